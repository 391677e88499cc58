"""Processes forked from one that has imported what they need, which takes three seconds of a core for a server, and
four more for a target that is no GGUF file.

A fork runs the same `main` as `python -m`, or the same program as `python -c`, with the pipes, the folder and the
environment that it would get from `subprocess`, but for what libraries read from the environment while they are
imported. So tests can start and kill many. Whole processes are started by the tests of `tests/engine/frontend`, some
examples, and all tests that are marked slow.

This module is both ends: `ForkedProcess` asks the fork server, which is this module as a program. The server tells the
process id and the exit code of each fork, and kills it when whoever asked for it is gone.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

import pytest

_IMPORTED = (
    "engine.verifier.loop",
    "engine.model.target",
    "engine.drafting.worker",
    "drafters.registry",
    "engine.cli.main",
    "engine.server.run",
    "engine.weights.gguf.describe_process",
    "engine.compile_ahead",
    "engine.verifier.disk_cache",
    "engine.model.trial.forward_choice",
    "transformers.models.llama.modeling_llama",  # with it comes most of transformers
)
_ROOT = Path(__file__).parents[1]
_STARTING = ("engine.frontend.processes", "engine.weights.gguf.described_folder")
"""Modules whose processes are forked."""
_ADDRESS = "TALON_TESTS_FORK_SERVER"
"""The variable with the path of the fork server's socket, by which forks fork their own workers."""


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Let engines of this process fork their workers, and what describes a GGUF file."""
    for module in _STARTING:
        patch.setattr(f"{module}.subprocess", _SUBPROCESS)


@functools.cache
def fork_server() -> str:
    """Start the fork server of this process, unless it is a fork itself; return its address."""
    if known := os.environ.get(_ADDRESS):
        return known
    address = f"{tempfile.mkdtemp(prefix='talon-tests-')}/forks"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-m", __name__, str(listener.fileno())]
        server = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    _SERVERS.append(server)
    return address


_SERVERS: list[subprocess.Popen[bytes]] = []
"""They end when this process does, which closes their standard input."""


class ForkedProcess:
    """What tests and engines ask of `subprocess.Popen`."""

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] = os.environ,
        cwd: str | Path = "",
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
    ):
        """stderr: `STDOUT` if that is a pipe, too."""
        told = {"command": command[1:], "folder": str(cwd) or os.getcwd(), "new_session": start_new_session}
        request = json.dumps(told | {"environment": {**env}}).encode()
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[str] | None = None
        files, opened = [0, 1, 2], []
        if stdin == subprocess.PIPE:
            files[0], write = os.pipe()
            self.stdin = os.fdopen(write, "wb")
            opened.append(files[0])
        if stdout == subprocess.PIPE:
            read, files[1] = os.pipe()
            self.stdout = os.fdopen(read, "rb")
            opened.append(files[1])
        if stderr == subprocess.STDOUT:
            files[2] = files[1]
        elif stderr == subprocess.PIPE:
            read, files[2] = os.pipe()
            self.stderr = os.fdopen(read)
            opened.append(files[2])
        self._code: int | None = None
        self._asking = threading.Lock()
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(fork_server())
        socket.send_fds(self._link, [_number(len(request))], files)
        self._link.sendall(request)
        for file in opened:
            os.close(file)
        self.pid = int.from_bytes(_received(self._link, 4), "big")

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.returncode = self.wait()

    def poll(self) -> int | None:
        with self._asking:
            if self._code is None and select.select([self._link], [], [], 0)[0]:
                self._code = int.from_bytes(_received(self._link, 4), "big", signed=True)
                self._link.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            select.select([self._link], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c PROGRAM ARGUMENTS` in the repository's folder until it ends."""
    command = [sys.executable, "-c", program, *arguments]
    with ForkedProcess(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.read().decode(), process.stderr.read()
    return subprocess.CompletedProcess(command, process.returncode, *said)


_SUBPROCESS = SimpleNamespace(Popen=ForkedProcess, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT,
                              TimeoutExpired=subprocess.TimeoutExpired)  # fmt: skip
"""What stands for `subprocess` where workers are started."""


def _number(value: int, signed: bool = False) -> bytes:
    return value.to_bytes(4, "big", signed=signed)


def _received(link: socket.socket, size: int) -> bytes:
    """Receive so many bytes."""
    found = b""
    while len(found) < size:
        if not (part := link.recv(size - len(found))):
            raise ConnectionError("the fork server has ended")
        found += part
    return found


def main() -> None:
    """Fork a process for each request, until standard input closes."""
    for module in _IMPORTED:
        with suppress(ImportError):  # the server's need packages that may not be installed
            import_module(module)
    gc.freeze()  # a fork's collections would copy what it shares
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(listener: socket.socket) -> None:
    forks: dict[int, socket.socket] = {}  # whoever asked for it, by process id
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while sys.stdin not in (ready := select.select([listener, sys.stdin, ended, *forks.values()], [], [])[0]):
        for fork in [fork for fork, link in forks.items() if link in ready]:
            os.kill(fork, signal.SIGKILL)  # whoever asked for it is gone
        if ended in ready:
            os.read(ended, 1 << 16)
            _tell_ended(forks)
        if listener in ready:
            with suppress(ConnectionError, ValueError):  # whoever asks may be killed meanwhile
                _fork(listener, forks)
    for fork in forks:
        os.kill(fork, signal.SIGKILL)
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)


def _fork(listener: socket.socket, forks: dict[int, socket.socket]) -> None:
    """Fork what the next request asks for."""
    link, _ = listener.accept()
    head, files, *_ = socket.recv_fds(link, 4, 3)
    request = json.loads(_received(link, int.from_bytes(head, "big")))
    if (fork := os.fork()) == 0:
        address = listener.getsockname()
        for inherited in (listener, link, *forks.values()):
            inherited.close()
        _become(request, files, address)
    for file in files:
        os.close(file)
    forks[fork] = link
    link.sendall(_number(fork))


def _tell_ended(forks: dict[int, socket.socket]) -> None:
    """Tell of each fork that has ended its exit code."""
    for fork in [*forks]:
        number, status = os.waitpid(fork, os.WNOHANG)
        if number:
            with forks.pop(fork) as link, suppress(OSError):
                link.sendall(_number(os.waitstatus_to_exitcode(status), signed=True))


def _become(request: dict[str, Any], files: list[int], address: str) -> NoReturn:
    """Run what is asked for, with these files for the standard ones."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    code = _run(**request, address=address)
    sys.stdout.flush()
    os._exit(code)  # an interpreter's usual end would copy all that the fork shares


def _run(command: list[str], folder: str, new_session: bool, environment: dict[str, str], address: str) -> int:
    """Do what `python COMMAND` does; return its exit code."""
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | {_ADDRESS: address})
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    option, program, *_ = command
    sys.argv = ["-c", *command[2:]] if option == "-c" else command[1:]
    if program != "engine.worker":
        for starting in _STARTING:
            import_module(starting).__dict__["subprocess"] = _SUBPROCESS
    try:
        if option == "-c":
            exec(program, {"__name__": "__main__"})
        else:
            found = import_module(program)
            (import_module(f"{program}.__main__") if hasattr(found, "__path__") else found).main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
