"""`talon serve` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.forked_process import ForkedProcess

ROOT = Path(__file__).parents[3]
KEY = "secret"


class ServerProcess:
    """url: where it listens. lines: what it has logged so far. whole: its workers are its own children, and it imports
    what it needs itself; otherwise all are forked.
    """

    def __init__(self, *options: str, whole: bool = False, **environment: str):
        command = [sys.executable, "-m", "engine", "serve", "--port", "0", "--set", "verifier.threads=1", *options]
        more = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        start = partial(subprocess.Popen, text=True) if whole else ForkedProcess
        self.process: Any = start(command, cwd=ROOT, env=os.environ | more, stderr=subprocess.PIPE)
        self.lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self.url = self._posted = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, timeout_s: float = 120) -> ServerProcess:
        """Wait until it serves."""
        self._serving.wait(timeout_s)
        assert self.url, "".join(self.raw)
        return self

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Send a signal, and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        code: int = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def requests(self) -> list[dict[str, Any]]:
        """Return what the log says of requests."""
        return [line for line in self.lines if line.get("event") == "request"]

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """Send a JSON body."""
        answer = httpx.post(self.url + path, json={"model": "tiny", **fields}, timeout=120)
        self._posted = answer.headers["x-request-id"]
        return answer

    def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """Return an answer that is no error."""
        answer = self.post(path, **fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the objects of a stream that is no error."""
        answer = self.post(path, **{"stream": True, **fields})
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    def logged(self, number: str = "", timeout_s: float = 60) -> dict[str, Any]:
        """Return what the log says of the request of that id, or of the latest that was posted, once it does: a line is
        written after its answer.
        """
        until_s = time.monotonic() + timeout_s
        while not (found := [line for line in self.requests() if line["id"] == (number or self._posted)]):
            assert time.monotonic() < until_s, "".join(self.raw)
            time.sleep(0.01)
        (line,) = found
        return line

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.raw.append(line)
            if line.startswith("{"):
                self.lines.append(fields := json.loads(line))
                if fields.get("event") == "serving":
                    self.url = fields["url"]
                    self._serving.set()
        self._serving.set()


@contextmanager
def serving(*options: str, whole: bool = False, **environment: str) -> Iterator[ServerProcess]:
    """Start a server, which ends with the block."""
    server = ServerProcess(*options, whole=whole, **environment)
    try:
        yield server.wait()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@contextmanager
def occupied(server: ServerProcess) -> Iterator[None]:
    """Let a long answer take the only place of a server that wants KEY, inside the block."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": -1, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()  # the end of this iterator would end the request
        next(lines)
        yield
