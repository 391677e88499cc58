"""What a worker process (`python -m engine.worker`) or worker thread runs: connect, load, serve, report what failed."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from engine.config import Config, cores
from engine.errors import TalonError
from engine.keys import Keys, load
from engine.loop_link import LoopHub, LoopLine
from engine.messages import Failed
from engine.transport import Hub, Line

if TYPE_CHECKING:
    from engine.drafter import DrafterWorker


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything a worker needs to start. control: the front end's endpoint; drafts: the verifier's for drafters."""

    role: str
    name: str
    control: str
    drafts: str
    config: dict[str, Any]


Loaded = Callable[[], None]
"""Called when everything is loaded, before the worker serves."""


def run_worker(spec: WorkerSpec, context: zmq.Context[Any], loaded: Loaded = lambda: None) -> None:
    """Serve as `spec.role` until told to stop; a failed start is reported to the front end in one line."""
    config = Config.model_validate(spec.config)
    if spec.role == "verifier":
        _run_verifier(spec, config, context, loaded)
    else:
        _run_drafter(spec, config, context, loaded)


def _run_verifier(spec: WorkerSpec, config: Config, context: zmq.Context[Any], loaded: Loaded) -> None:
    from engine.verifier import FROM_FRONT_END, Verifier

    with (
        _reporting(Line(context, spec.control, spec.name, FROM_FRONT_END)) as control,
        closing(_hub(spec, config, context)) as drafts,
    ):
        import torch

        from engine.recorded import own_stream
        from engine.target import Target

        threads = share_cores(config)
        torch.set_num_threads(threads.verifier(config.mode == "async"))
        target = Target.load(config.model, config.dtype, config.device, config.verifier.kv_memory)
        with own_stream(target.device, urgent=False), _beside(spec, config, context, drafts) as drafter:
            verifier = Verifier(config, target, control, drafts, threads, drafter)
            loaded()
            verifier.run()


def _hub(spec: WorkerSpec, config: Config, context: zmq.Context[Any]) -> Hub | LoopHub:
    """The hub that drafters connect to."""
    from engine.verifier import FROM_DRAFTER

    if shares_loop(config):
        return LoopHub()
    return Hub(context, spec.drafts, FROM_DRAFTER, load_keys(config, "verifier"), most_unread(config))


@contextmanager
def _beside(
    spec: WorkerSpec, config: Config, context: zmq.Context[Any], drafts: Hub | LoopHub
) -> Iterator[DrafterWorker | None]:
    """The drafter that takes turns with the verifier in its own loop; None if it runs elsewhere."""
    if isinstance(drafts, LoopHub):
        with (
            closing(Line(context, spec.control, f"drafter-of-{spec.name}", ())) as control,
            _drafter(config, control, drafts.line) as worker,
        ):
            yield worker
    else:
        yield None


def _run_drafter(spec: WorkerSpec, config: Config, context: zmq.Context[Any], loaded: Loaded) -> None:
    from drafters.registry import METHODS
    from engine.drafter import FROM_FRONT_END, FROM_VERIFIER

    with (
        _reporting(Line(context, spec.control, spec.name, FROM_FRONT_END)) as control,
        closing(
            Line(context, spec.drafts, spec.name, FROM_VERIFIER, load_keys(config, "drafter"), most_unread(config))
        ) as verdicts,
    ):
        stream: AbstractContextManager[None] = nullcontext()
        if METHODS[config.method].has_model:
            import torch

            from engine.loading import find_device
            from engine.recorded import own_stream

            torch.set_num_threads(share_cores(config).drafter)
            stream = own_stream(find_device(config.device), urgent=True)
        with stream, _drafter(config, control, verdicts) as worker:
            loaded()
            worker.run()


@contextmanager
def _drafter(config: Config, control: Line, verdicts: Line | LoopLine) -> Iterator[DrafterWorker]:
    """The loaded drafter; what it has learnt is saved at the end."""
    from drafters.registry import build_for_worker
    from engine.drafter import DrafterWorker

    drafter = build_for_worker(config)
    yield DrafterWorker(drafter, control, verdicts, config.trace is not None)


def shares_loop(config: Config) -> bool:
    """Whether the verifier's worker also runs the drafter. In turns one of the two always waits for the other: a
    process has to be woken, a thread contends for Python's lock, and a draft model has half of the cores.
    """
    from drafters.registry import find

    return config.mode == "sequential" and config.transport != "tcp" and find(config.method).drafter is not None


@contextmanager
def _reporting(control: Line) -> Iterator[Line]:
    """The line to the front end, which is told in one line why the worker ended."""
    with closing(control):
        try:
            yield control
        except zmq.ContextTerminated:
            pass  # the engine was closed while this thread was still loading: there is nobody to tell
        except TalonError as error:
            control.send(Failed(request=None, kind=type(error).__name__, text=str(error)))


_UNREAD = 1024


def most_unread(config: Config) -> int:
    """Messages that a drafter may leave unread at either end of its line. A drafter that joins is told of all requests
    at once, and half of that must fit beside what it has not read yet.
    """
    return _UNREAD + 4 * config.queue.size


def load_keys(config: Config, side: str) -> Keys | None:
    """The keys of one side of a tcp link; None without such a link or without keys."""
    if config.transport != "tcp" or config.tcp.keys is None:
        return None
    return load(Path(config.tcp.keys), side)


_BOTH_CORES = 4  # with fewer, drafting during the target's forward slows it down more than it gains


def settled(config: Config) -> tuple[Config, str | None]:
    """The configuration with `mode: auto` set to `sequential` if overlap cannot pay, and a line that says so.

    On two cores drafting ahead was 0.4 times (`hybrid`) to 0.9 times (`block`) as fast as turns in one loop.
    """
    from drafters.registry import find
    from engine.loading import find_device

    if config.mode != "auto" or find(config.method).drafter is None:
        return config, None
    elsewhere = config.transport == "tcp" or config.verifier.simulated_latency_ms > 0
    if cores() >= _BOTH_CORES or elsewhere or find_device(config.device).type != "cpu":
        return config, None
    line = f"mode=auto: drafter and verifier work in turns, as both at once would share {cores()} cores"
    return config.model_copy(update={"mode": "sequential"}), line


class Threads(NamedTuple):
    """Threads of each worker's pool. verifier_alone: while no draft model computes at the same time."""

    verifier_alone: int
    verifier_beside: int
    drafter: int

    def verifier(self, ahead: bool) -> int:
        """Threads of the target. ahead: drafts are made while it runs."""
        return self.verifier_beside if ahead else self.verifier_alone


def share_cores(config: Config) -> Threads:
    """A draft model in its own worker gets half of the cores; in the verifier's loop it uses the verifier's threads.
    Any other drafter needs none. More threads than cores are refused: two workers of two threads each on two cores were
    measured to run 6 to 8 times slower.
    """
    from drafters.registry import find

    available, wanted = cores(), config.verifier.threads
    alone = min(wanted or available, available)
    if config.remote:  # neither shares its machine with the other
        return Threads(alone, alone, min(config.drafter.threads or available, available))
    if shares_loop(config):
        return Threads(alone, alone, alone)
    if not find(config.method).has_model:
        return Threads(alone, alone, 1)
    drafter = min(config.drafter.threads or max(1, available // 2), available)
    return Threads(alone, min(wanted or available, max(1, available - drafter)), drafter)


def oversubscription(config: Config) -> str | None:
    """A warning if the configuration asks for threads that it does not get, else None."""
    given, asked = share_cores(config), config.drafter.threads
    if shares_loop(config) and asked is not None and asked != given.drafter:
        return f"drafter.threads={asked}: {given.drafter} used, those of the verifier, in whose loop the drafter works"
    beside = given.verifier_alone if config.mode == "sequential" else given.verifier_beside
    for key, wanted, threads in (
        ("verifier.threads", config.verifier.threads, beside),
        ("drafter.threads", config.drafter.threads, given.drafter),
    ):
        if wanted is not None and wanted > threads:
            return (
                f"{key}={wanted}: {threads} used, since drafter and verifier share {cores()} cores; "
                "with more threads than cores both were measured to run 6 to 8 times slower"
            )
    return None


def main() -> None:
    """Read the spec from standard input. When that closes, the front end is gone: clean up and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front end's to handle
    if not (line := sys.stdin.readline()):
        return
    spec = msgspec.convert(json.loads(line), WorkerSpec)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if spec.control.startswith("ipc://"):
            shutil.rmtree(Path(spec.control[len("ipc://") :]).parent, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with zmq.Context() as context:
        run_worker(spec, context, _exempt_from_garbage_collection)


def _exempt_from_garbage_collection() -> None:
    """To look for garbage among the half million loaded objects takes a quarter of a second; all requests wait."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    if sys.argv[1:] == ["verifier"]:
        for module in ("engine.verifier", "engine.target"):
            importlib.import_module(module)
    main()
