"""A worker's process forked from one that has imported what workers need, which takes two seconds of a core.

It runs the same `main` in a session of its own, with the pipes, the folder and the environment that it would get from
`subprocess`, but for what libraries read from the environment while they are imported. So tests can start and kill
many. Whole processes are started by the tests of `tests/engine/frontend`, by servers, examples, and all tests that are
marked slow.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

_IMPORTED = ["engine.verifier.loop", "engine.model.target", "engine.drafting.worker", "drafters.registry"]


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Let engines fork their workers."""
    forkserver.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()
    known = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    patch.setattr("engine.frontend.processes.subprocess", SimpleNamespace(Popen=ForkedWorker, **known))


class ForkedWorker:
    """What an engine asks of the `subprocess.Popen` of a worker."""

    def __init__(self, command: list[str], stdin: int, env: dict[str, str], start_new_session: bool):
        assert command[1:3] == ["-m", "engine.worker"] and stdin == subprocess.PIPE and start_new_session
        read, write = multiprocessing.Pipe(duplex=False)
        files = [read, *(Connection(os.dup(number), readable=False) for number in (1, 2))]
        make = multiprocessing.get_context("forkserver").Process
        self._process = make(target=_work, args=(command[3], os.getcwd(), env, files), daemon=True)
        self._process.start()
        for file in files:
            file.close()
        self.stdin = os.fdopen(os.dup(write.fileno()), "wb")
        write.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("engine.worker", timeout or 0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _work(role: str, folder: str, environment: dict[str, str], files: list[Connection]) -> None:
    """Do what `python -m engine.worker ROLE` does. files: standard input, output and error."""
    from engine.worker import main

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["engine.worker", role]
    main()
