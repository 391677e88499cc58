"""The fork server for drafters: a process does a draft model's imports, which take seconds, and forks when one dies.

It computes nothing, so its forks are safe, and it imports at a low priority while the engine works. A fork is an
ordinary worker: its end of a socket pair is its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec

from drafters.registry import METHODS, parts
from engine import worker
from engine.config import Config
from engine.worker import WorkerSpec

_NICENESS = 10
_FORKED_S = 1.0  # from the request for a fork to its first message
_REAPED_S = 1.0  # from the end of a fork to the end of its process


class Nursery:
    """The front end's side of the fork server."""

    def __init__(self, config: Config, environment: dict[str, str]):
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "engine.nursery", config.model_dump_json()]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, start_new_session=True)
        self._socket.setblocking(False)
        self._ready = False

    def ready(self) -> bool:
        """Whether its imports are done."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._socket.recv(1) == b"r"
        return self._ready

    def fork(self, spec: WorkerSpec) -> ForkedWorker | None:
        """A worker of that spec; None while the imports are running, or if the fork server has died."""
        if not self.ready():
            return None
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [b"f"], [theirs.fileno()])
            return ForkedWorker(spec, ours)
        return None

    def end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ForkedWorker:
    """A fork of the fork server. It sends its process id; when its connection closes, it has ended."""

    def __init__(self, spec: WorkerSpec, connection: socket.socket):
        self.name = spec.name
        self._socket, self._alive, self._pid = connection, True, 0
        self._socket.sendall(json.dumps(msgspec.to_builtins(spec)).encode() + b"\n")

    @property
    def pid(self) -> int:
        """0 until it has been forked."""
        if not self._pid:
            self._hear(_FORKED_S)
        return self._pid

    def alive(self) -> bool:
        self._hear(0)
        return self._alive

    def end(self, timeout_s: float) -> None:
        if self.pid and self._alive:
            self._hear(timeout_s)
            if self._alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
        self._socket.close()
        deadline = time.monotonic() + _REAPED_S
        while self._pid and _exists(self._pid) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _hear(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)
        try:
            said = self._socket.recv(32)
        except (BlockingIOError, TimeoutError):
            return
        except ConnectionError:
            said = b""
        self._alive, self._pid = bool(said), int(said or self._pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Import, then fork on demand until the front end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = socket.socket(fileno=os.dup(0))
    imports = threading.Thread(target=_warm_up, args=(Config.model_validate_json(sys.argv[1]),))
    imports.start()
    while imports.is_alive():
        imports.join(0.2)
        with contextlib.suppress(BlockingIOError):
            if not orders.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks leave no zombies
    orders.send(b"r")
    while True:
        try:
            order, files, _, _ = socket.recv_fds(orders, 1, 1)
        except ConnectionError:  # the front end ended before it read that all is ready
            return
        if not order:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(files[0], 0)
            os.write(0, str(os.getpid()).encode())
            orders.close()
            os.close(files[0])
            return worker.main()
        os.close(files[0])


def _warm_up(config: Config) -> None:
    """Import the drafter's own modules, and those of its model's family if it has one."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)  # on Linux, only of this thread
    importlib.import_module("engine.drafter")
    if "suffix" in parts(config):
        importlib.import_module("retrieval_index.ngrams")
    for method in (config.method, *parts(config)):
        where = METHODS[method].drafter
        assert where is not None
        importlib.import_module(where.partition(":")[0])
    with contextlib.suppress(Exception):  # no draft model, or one whose code has no module of its own
        from engine.loading import load_config

        family = load_config(config.drafter.weights("sps") or "").model_type
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")


if __name__ == "__main__":
    main()
