"""Starts, watches, restarts and stops the workers, as threads (inproc) or processes (ipc, tcp)."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from drafters.registry import check
from engine.config import AUTO, Config
from engine.core.child_environment import child_environment
from engine.core.methods import find
from engine.placement import share_cores, shares_loop
from engine.weights.gguf.source import source_of
from engine.wire.transport import Router
from engine.worker import WorkerSpec, load_keys, run_worker

STOP_S = 5.0
POOL_WAITS = {"GOMP_SPINCOUNT": "3000"}
"""How long a pool's idle threads spin before they sleep: 3,000 turns, some 0.1 ms, from one step of a forward to the
next. With a third of that a forward takes 5% longer, since threads have to be woken between its parts. Three times as
long costs 3%, because the threads keep a core from the drafter that a verdict has just woken. If another program takes
a core, threads spin for one that cannot run: a forward of 7 ms takes 18, 25 or 53 ms at 1,000, 3,000 or 10,000 turns.
"""
_BACK_OFF_S = (0.0, 0.0, 0.2, 0.5)  # before the first, second, ... restart in a row
_STABLE_S = 30.0  # a worker that lived this long resets the count


class Worker(Protocol):
    """A running worker. name: how it signs its messages."""

    name: str

    def alive(self) -> bool: ...

    def end(self, timeout_s: float) -> None:
        """Wait for a worker that was asked to stop; kill it if it does not."""


class ProcessWorker:
    """`python -m engine.worker ROLE`, which exits when its standard input closes. It waits for its spec; a verifier
    does its imports before. name: "" until it has a spec.
    """

    def __init__(self, role: str, config: Config):
        self.name = ""
        command = [sys.executable, "-m", "engine.worker", role]
        environment = _environment(config, role)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)

    def begin(self, spec: WorkerSpec) -> None:
        self.name = spec.name
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which `alive` will show
            self._process.stdin.write(json.dumps(msgspec.to_builtins(spec)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s if self.name else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it did not live to read its spec
                self._process.stdin.close()


def _environment(config: Config, role: str) -> dict[str, str]:
    """Return the environment of a worker's process and of its libraries' thread pools."""
    shares = share_cores(config)
    threads = str(shares.verifier_alone if role == "verifier" else shares.drafter)
    return child_environment() | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **POOL_WAITS,
        "TOKENIZERS_PARALLELISM": "false",
    }


def begin_imports(config: Config) -> ProcessWorker | None:
    """Start a verifier that does its imports (seconds) while the front end does its own; None if workers
    are threads.
    """
    return None if config.transport == "inproc" else ProcessWorker("verifier", config)


def _run_in_thread(spec: WorkerSpec, context: zmq.Context[Any]) -> None:
    """Run `run_worker`; unlike a process, a thread does not return a GPU's memory by ending."""
    try:
        run_worker(spec, context)
    finally:
        if "torch" in sys.modules:
            from engine.model.cuda.graphs import release_memory

            release_memory()


class ThreadWorker:
    """A thread of this process; it cannot be killed, only asked to stop."""

    def __init__(self, spec: WorkerSpec, context: zmq.Context[Any]):
        self.name = spec.name
        self._thread = threading.Thread(target=_run_in_thread, args=(spec, context), name=spec.name, daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class NotStarted:
    """A worker before the system has started it, and if that fails: one that has ended."""

    def __init__(self, name: str):
        self.name = name

    def alive(self) -> bool:
        return False

    def end(self, timeout_s: float) -> None: ...


class Workers:
    """The workers of one engine by role, and their endpoints. Every start gets a new name.

    first_verifier: a process started early, still without a spec.
    """

    def __init__(self, config: Config, context: zmq.Context[Any], first_verifier: ProcessWorker | None = None):
        self.config, self._context = config, context
        self.method = find(config.method)
        self.folder = Path(tempfile.mkdtemp(prefix="talon-")) if config.transport != "inproc" else None
        self.control = self._endpoint("control")
        self.running: dict[str, Worker] = {}
        self.heard_s: dict[str, float] = {}
        self._first_verifier = first_verifier
        self._starts = 0
        self._meeting = ""
        self._history: dict[str, tuple[float, int]] = {}

    @property
    def roles(self) -> list[str]:
        """The roles that are started on this machine."""
        return ["verifier", "drafter"] if self._drafts_here and not shares_loop(self.config) else ["verifier"]

    @property
    def in_threads(self) -> bool:
        """Whether workers are threads of this process."""
        return self.folder is None

    @property
    def _drafts_here(self) -> bool:
        return self.method.drafter is not None and not self.config.remote

    def check(self) -> None:
        """Raise what is wrong with keys, tcp endpoint or the drafter's files, before a worker loads."""
        for role in self.roles:
            load_keys(self.config, role)
        if self.config.transport == "tcp":  # the drafter would otherwise join whatever holds the port
            # drafters that wait elsewhere would take a router without keys for ours
            keys = load_keys(self.config, "verifier")
            with zmq.Context() as context, closing(Router(context, self.config.tcp.endpoint, (), keys)):
                pass
        if self._drafts_here:
            check(self.config)

    def check_target(self) -> None:
        """Raise the error that the verifier would raise. No weights are read, but imports take seconds. So where the
        verifier is a process of its own, only Talon's cache is read, which transformers has read once.
        """
        if source_of(Path(self.config.model)) is not None and not self.in_threads:
            return
        from engine.model.loading import find_device, load_config

        importlib.import_module("transformers.models.auto.tokenization_auto")  # before threads import concurrently
        load_config(self.config.model)
        find_device(self.config.device)

    def keep_activations(self, activations: str) -> None:
        """Start every further verifier with the activations that the first one has chosen, so that texts go on with
        them.
        """
        if self.config.activations == AUTO:
            self.config = self.config.model_copy(update={"activations": activations})

    def start(self, role: str) -> None:
        """Start a worker. A new verifier gets a new endpoint for drafters, so the drafter must be started after it.
        Raises OSError if the system starts no process; the worker then counts as one that has died.
        """
        self._starts += 1
        if role == "verifier":
            self._meeting = self._meeting_point()
        spec = WorkerSpec(
            role=role,
            name=f"{role}-{self._starts}-{uuid.uuid4().hex[:12]}",  # unique: engines may meet over tcp
            control=self.control,
            drafts=self._meeting if role == "verifier" else reachable(self._meeting),
            config=self.config.model_dump(mode="json"),
        )
        self.heard_s[role] = time.monotonic()
        _, failures = self._history.get(role, (0.0, 0))
        self._history[role] = (time.monotonic(), failures)
        self.running[role] = NotStarted(spec.name)
        self.running[role] = self._begin(spec)

    def _begin(self, spec: WorkerSpec) -> Worker:
        if self.in_threads:
            return ThreadWorker(spec, self._context)
        process, self._first_verifier = self._first_verifier or ProcessWorker(spec.role, self.config), None
        process.begin(spec)
        return process

    def dead(self, role: str, patience_s: float, now_s: float) -> str | None:
        """Return why the worker must be replaced, or None if it is healthy. patience_s: how long it may be silent.
        now_s: on the `time.monotonic` clock.
        """
        worker = self.running.get(role)
        if worker is None:
            return None
        if not worker.alive():
            return "died"
        if now_s - self.heard_s[role] > patience_s:
            return f"was silent for {patience_s:g} s"
        return None

    def forgive_silence(self, absent_s: float, now_s: float) -> None:
        """Leave the last `absent_s` out of every silence, because nobody was listening."""
        self.heard_s = {role: min(now_s, heard_s + absent_s) for role, heard_s in self.heard_s.items()}

    def back_off_s(self, role: str) -> float:
        """Return how long to wait before the next start of `role`: longer each time that it fails early."""
        started, failures = self._history[role]
        failures = 0 if time.monotonic() - started > _STABLE_S else failures
        self._history[role] = (started, failures + 1)
        return _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]

    def end(self, role: str, timeout_s: float) -> None:
        """Wait for the worker to stop, and kill it if it does not. Blocks."""
        if (worker := self.running.pop(role, None)) is not None:
            worker.end(timeout_s)

    def close(self) -> None:
        """Clean up, once all workers have ended."""
        if self._first_verifier is not None:
            self._first_verifier.end(0)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _meeting_point(self) -> str:
        """Return the endpoint for drafters. Over tcp it is always the same, the only one that remote drafters know."""
        return self.config.tcp.endpoint if self.config.transport == "tcp" else self._endpoint(f"drafts-{self._starts}")

    def _endpoint(self, name: str) -> str:
        if self.folder is not None:
            return f"ipc://{self.folder / name}"
        return f"inproc://{id(self)}-{name}"


def reachable(endpoint: str) -> str:
    """Return the address at which this machine reaches what is bound at `endpoint`."""
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:").replace("tcp://0.0.0.0:", "tcp://127.0.0.1:")
