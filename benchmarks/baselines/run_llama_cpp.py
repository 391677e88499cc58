"""Asks llama.cpp's server over HTTP. It runs under any Python and imports nothing of Talon.

Arguments: the server's program, a GGUF file, threads, requests at once, and further options of the server. It reads a
line of JSON for each measurement and answers with one, see `benchmarks.baselines.engines`. A server that ends at its
first prompt, as llama.cpp's kernels for AMX made it do, is started again without repacked weights.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    program, model, threads, most, *options = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    room = str(2048 * int(most))
    size = ["-t", threads, "-np", most, "-c", room, "--no-webui", "--port", str(port)]
    command = [program, "-m", model, *size, *options]
    url = f"http://127.0.0.1:{port}"

    def answer(prompt: list[int], max_tokens: int) -> int:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return int(json.load(reply)["tokens_predicted"])

    def works(server: subprocess.Popen[bytes]) -> bool:
        wait_for(url + "/health", server)
        try:
            answer(list(range(100, 164)), 2)
        except OSError:
            time.sleep(1.0)  # a program that crashes has ended by then
        return server.poll() is None

    server = start(command)
    try:
        if not works(server):
            server = start([*command, "--no-repack"])
            wait_for(url + "/health", server)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            started = time.perf_counter()
            with ThreadPoolExecutor(asked["at_once"]) as pool:
                tokens = list(pool.map(lambda p: answer(p, asked["max_tokens"]), asked["prompts"]))  # noqa: B023
            print(json.dumps({"seconds": time.perf_counter() - started, "tokens": tokens}), flush=True)
    finally:
        server.terminate()
        server.wait()


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if server.poll() is not None:
                sys.exit(f"the server ended with code {server.returncode}")
            time.sleep(0.1)
    sys.exit("the server was not ready in a minute")


if __name__ == "__main__":
    main()
