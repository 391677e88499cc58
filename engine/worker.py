"""What a worker process (`python -m engine.worker`) or worker thread runs: connect, load, serve, report what failed."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from engine.config import Config
from engine.core.errors import TalonError
from engine.placement import on_gpu, share_cores, shares_loop
from engine.wire.keys import Keys, load
from engine.wire.loop_link import LoopDealer, LoopRouter
from engine.wire.messages import Failed
from engine.wire.transport import Dealer, Router

if TYPE_CHECKING:
    from engine.drafting.worker import DrafterWorker


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
    """Serve as `spec.role` until the front end stops it; a failed start is reported to the front end in one line."""
    config = Config.model_validate(spec.config)
    if spec.role == "verifier":
        _run_verifier(spec, config, context, loaded)
    else:
        _run_drafter(spec, config, context, loaded)


def _run_verifier(spec: WorkerSpec, config: Config, context: zmq.Context[Any], loaded: Loaded) -> None:
    from engine.verifier.loop import FROM_FRONT_END, Verifier

    with (
        _reporting(Dealer(context, spec.control, spec.name, FROM_FRONT_END)) as control,
        closing(_router(spec, config, context)) as drafts,
    ):
        import torch

        from engine.device import own_stream
        from engine.model.target import Target
        from engine.verifier.disk_cache import disk_cache

        threads = share_cores(config, on_gpu(config))
        torch.set_num_threads(threads.verifier(config.mode == "async"))
        with _LOADING:
            target = Target.of_config(config)
        with (
            own_stream(target.device, urgent=False),
            disk_cache(config, target),
            _inline_drafter(spec, config, context, drafts) as drafter,
        ):
            verifier = Verifier(config, target, control, drafts, threads, drafter)
            loaded()
            verifier.run()


def _router(spec: WorkerSpec, config: Config, context: zmq.Context[Any]) -> Router | LoopRouter:
    """Open the router that drafters connect to."""
    from engine.verifier.loop import FROM_DRAFTER

    if shares_loop(config):
        return LoopRouter()
    return Router(context, spec.drafts, FROM_DRAFTER, load_keys(config, "verifier"), most_unread(config))


@contextmanager
def _inline_drafter(
    spec: WorkerSpec, config: Config, context: zmq.Context[Any], drafts: Router | LoopRouter
) -> Iterator[DrafterWorker | None]:
    """Give the drafter that takes turns with the verifier in its own loop; None if it runs elsewhere."""
    if isinstance(drafts, LoopRouter):
        with (
            closing(Dealer(context, spec.control, f"drafter-of-{spec.name}", ())) as control,
            _drafter(config, control, drafts.dealer) as worker,
        ):
            yield worker
    else:
        yield None


def _run_drafter(spec: WorkerSpec, config: Config, context: zmq.Context[Any], loaded: Loaded) -> None:
    from engine.core.methods import METHODS
    from engine.drafting.worker import FROM_FRONT_END, FROM_VERIFIER

    with (
        _reporting(Dealer(context, spec.control, spec.name, FROM_FRONT_END)) as control,
        closing(
            Dealer(context, spec.drafts, spec.name, FROM_VERIFIER, load_keys(config, "drafter"), most_unread(config))
        ) as verdicts,
    ):
        stream: AbstractContextManager[None] = nullcontext()
        if METHODS[config.method].has_model:
            import torch

            from engine.device import own_stream
            from engine.model.loading import find_device

            torch.set_num_threads(share_cores(config, on_gpu(config)).drafter)
            stream = own_stream(find_device(config.device), urgent=True)
        with stream, _drafter(config, control, verdicts) as worker:
            loaded()
            worker.run()


_LOADING = threading.Lock()
"""While transformers makes a model, torch's default type is that model's for all threads of the process. A worker that
runs beside may not depend on it: whatever it allocates for a kernel names its type."""


@contextmanager
def _drafter(config: Config, control: Dealer, verdicts: Dealer | LoopDealer) -> Iterator[DrafterWorker]:
    """Give the loaded drafter, which is closed at the end."""
    from drafters.registry import build_for_worker
    from engine.drafting.worker import DrafterWorker

    with _LOADING:
        built = build_for_worker(config)
    with closing(built) as drafter:
        yield DrafterWorker(drafter, control, verdicts, config.trace is not None)


@contextmanager
def _reporting(control: Dealer) -> Iterator[Dealer]:
    """Give the link to the front end, which gets one line that says why the worker ended."""
    with closing(control):
        try:
            yield control
        except zmq.ContextTerminated:
            pass  # the engine was closed while this thread was still loading: there is nobody to tell
        except TalonError as error:
            control.send(Failed(request=None, kind=type(error).__name__, text=str(error)))


_UNREAD = 1024


def most_unread(config: Config) -> int:
    """Return how many messages a drafter may leave unread at either end of its link. A drafter that joins gets all
    requests at once, and half of that must fit on top of what it has not read yet.
    """
    return _UNREAD + 4 * config.queue.size


def load_keys(config: Config, side: str) -> Keys | None:
    """Load the keys of one side of a tcp link; None without such a link or without keys."""
    if config.transport != "tcp" or config.tcp.keys is None:
        return None
    return load(Path(config.tcp.keys), side)


_KNOWN_S = 0.5  # so long after its imports a verifier has usually been told of a model that an earlier start knows


def _import_early() -> None:
    """Import what a verifier needs while the front end finds its model, and what trying a new model needs if that takes
    longer: then the model is being downloaded or described.
    """
    for module in ("engine.verifier.loop", "engine.model.target"):
        importlib.import_module(module)
    if not select.select([sys.stdin], [], [], _KNOWN_S)[0]:
        importlib.import_module("engine.model.trial.forward_choice")


def main() -> None:
    """Read the spec from standard input. When that closes, the front end is gone: clean up and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front end's to handle
    if sys.argv[1:] == ["verifier"]:
        _import_early()
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
    if spec.role == "verifier":
        from engine import compile_ahead
        from engine.kernels.jit_cache import on_first_compilation

        on_first_compilation(lambda: compile_ahead.begin(Config.model_validate(spec.config)))
    with zmq.Context() as context:
        run_worker(spec, context, _settle_memory)


def _settle_memory() -> None:
    """Exempt loaded objects from garbage collection, and return to the system what loading has freed. A search through
    half a million objects takes a quarter of a second, in which all requests wait; glibc would keep some hundred MB of
    files and tables that are read no more, and other C libraries have no such call.
    """
    gc.collect()
    gc.freeze()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


if __name__ == "__main__":
    main()
