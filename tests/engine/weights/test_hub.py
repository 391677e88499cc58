"""Models of the hub, from a hub of one repository that runs here."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.config import load
from engine.weights.hub import _needed
from engine.weights.resolve import resolved

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(files: Path, go_on: threading.Event | None = None) -> Iterator[tuple[str, list[str]]]:
    """A hub whose only repository is Some/Model with these files; its address, and the paths that are read. go_on:
    what it waits for in the middle of each file.
    """
    names = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
    read: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path, prefix = self.path.partition("?")[0], f"/Some/Model/resolve/{COMMIT}/"
            if path == "/":
                self.send(b"", {})
            elif path == "/api/models/Some/Model/revision/main":
                self.send(json.dumps({"id": "Some/Model", "sha": COMMIT}).encode(), {})
            elif path.startswith(f"/api/models/Some/Model/tree/{COMMIT}"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in names.items()
                ]
                self.send(json.dumps(tree).encode(), {})
            elif path.startswith(prefix) and (name := path[len(prefix) :]) in names:
                if self.command == "GET":
                    read.append(name)
                etag = hashlib.sha1(names[name]).hexdigest()
                self.send(names[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
            else:
                self.send_error(404)

        def send(self, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                half = len(data) // 2 if self.path.startswith("/Some/Model/resolve/") else 0
                self.wfile.write(data[:half])
                if go_on is not None and half:
                    go_on.wait()
                with suppress(ConnectionError):
                    self.wfile.write(data[half:])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", read
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(models: list[str], endpoint: str, home: Path) -> tuple[list[str], str]:
    """What a process of its own gets, and what it says."""
    code = f"from engine.weights.hub import fetched; print(*map(fetched, {models!r}), sep='\\n')"
    done = run(code, endpoint, home)
    done.check_returncode()
    return done.stdout.splitlines(), done.stderr


def refused(model: str, key: str, endpoint: str, home: Path) -> str:
    """The error of a process of its own."""
    done = run(f"from engine.weights.hub import fetched; fetched({model!r}, {key!r})", endpoint, home)
    return done.stderr.splitlines()[-1].removeprefix("engine.core.errors.ModelError: ")


def run(code: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own, since the hub's address is read at import."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 2_000_000)
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    (folder / "onnx" / "model.json").write_text("{}")
    return folder


def test_a_model_of_the_hub_is_downloaded_once_without_copies_in_other_formats(files: Path, tmp_path: Path) -> None:
    """And found without the hub; what that does not have stays a name."""
    strangers = ["Other/Model", "heads/{method}"]
    with hub(files) as (endpoint, read):
        (folder, *others), said = fetched(["Some/Model", *strangers], endpoint, tmp_path / "home")
        assert sorted(path.name for path in Path(folder).iterdir()) == ["config.json", "model.safetensors"]
        assert said == "talon: downloading Some/Model, 2 MB\n" and others == strangers
        assert sorted(read) == ["config.json", "model.safetensors"]
        assert fetched(["Some/Model"], endpoint, tmp_path / "home") == ([folder], "")
        assert len(read) == 2
    assert fetched(["Some/Model"], endpoint, tmp_path / "home") == ([folder], "")


def heed_interrupt() -> None:
    """A shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("command", "number"), [(["generate", "hi"], signal.SIGINT), (["serve", "--port", "0"], signal.SIGTERM)]
)
def test_a_command_that_is_interrupted_does_not_wait_for_a_download_and_the_next_start_gets_whole_files(
    files: Path, tmp_path: Path, command: list[str], number: signal.Signals
) -> None:
    go_on, home = threading.Event(), tmp_path / "home"
    with hub(files, go_on) as (endpoint, read):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
        process = subprocess.Popen(
            [sys.executable, "-m", "engine", *command, "--set", "model=Some/Model"],
            env=os.environ | environment,
            preexec_fn=heed_interrupt,
        )
        try:
            while "model.safetensors" not in read:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
            process.wait()
            go_on.set()
        (folder,), _ = fetched(["Some/Model"], endpoint, home)
    assert (Path(folder) / "model.safetensors").read_bytes() == (files / "model.safetensors").read_bytes()


def test_a_repository_of_gguf_files_alone_says_to_download_one_of_them(tmp_path: Path) -> None:
    for name in ("README.md", "config.json", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_text("{}")
    told = (
        "drafter.path=Some/Model: holds GGUF files alone (tiny-Q4_K_M.gguf, tiny-Q8_0.gguf): download one, and set "
        "drafter.path=FILE.gguf"
    )
    with hub(tmp_path / "files") as (endpoint, read):
        assert refused("Some/Model", "drafter.path", endpoint, tmp_path / "home") == told
        assert not read


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (["config.json", "pytorch_model.bin", "training_args.bin", "README.md"], ["README.md"]),
        (["config.json", "pytorch_model.bin", "model.safetensors"], ["pytorch_model.bin"]),
        (["config.json", "consolidated.safetensors", "model-00001-of-00002.safetensors"], ["consolidated.safetensors"]),
        (["config.json", "consolidated.safetensors"], []),
    ],
)
def test_weights_are_fetched_once_and_pickled_where_there_are_no_others(names: list[str], left_out: list[str]) -> None:
    assert _needed(names) == [name for name in names if name not in left_out]


def test_target_and_drafter_are_fetched_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.weights.resolve.fetched", lambda name, key: f"/fetched/{name}")
    config = resolved(load({"model": "Some/Model", "drafter": {"path": "Some/Head"}}))
    assert (config.model, config.drafter.path) == ("/fetched/Some/Model", "/fetched/Some/Head")
