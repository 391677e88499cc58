"""What a worker process (`python -m engine.worker`) or worker thread runs: connect, load, serve, report what failed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.config import Config, cores
from engine.errors import TalonError
from engine.messages import Failed
from engine.transport import Hub, Line


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything a worker is told. control: the front end's endpoint; drafts: the verifier's for drafters."""

    role: str
    name: str
    control: str
    drafts: str
    threads: int
    config: dict[str, Any]


def run_worker(spec: WorkerSpec, context: zmq.Context[Any]) -> None:
    """Serve as `spec.role` until told to stop; a failed start is reported to the front end in one line."""
    config = Config.model_validate(spec.config)
    if spec.role == "verifier":
        _run_verifier(spec, config, context)
    else:
        _run_drafter(spec, config, context)


def _run_verifier(spec: WorkerSpec, config: Config, context: zmq.Context[Any]) -> None:
    from engine.verifier import FROM_DRAFTER, FROM_FRONT_END, Verifier

    control = Line(context, spec.control, spec.name, FROM_FRONT_END)
    drafts = Hub(context, spec.drafts, FROM_DRAFTER)
    try:
        import torch

        from engine.target import Target

        torch.set_num_threads(spec.threads)
        target = Target.load(config.model, config.dtype, config.device)
        Verifier(config, target, control, drafts).run()
    except TalonError as error:
        control.send(Failed(request=None, kind=type(error).__name__, text=str(error)))
    finally:
        control.close()
        drafts.close()


def _run_drafter(spec: WorkerSpec, config: Config, context: zmq.Context[Any]) -> None:
    from drafters.registry import METHODS, build
    from engine.drafter import FROM_FRONT_END, FROM_VERIFIER, DrafterWorker

    control = Line(context, spec.control, spec.name, FROM_FRONT_END)
    verdicts = Line(context, spec.drafts, spec.name, FROM_VERIFIER)
    try:
        if METHODS[config.method].has_model:
            import torch

            torch.set_num_threads(spec.threads)
        DrafterWorker(build(config), control, verdicts).run()
    except TalonError as error:
        control.send(Failed(request=None, kind=type(error).__name__, text=str(error)))
    finally:
        control.close()
        verdicts.close()


def share_cores(config: Config, drafter_has_model: bool) -> tuple[int, int]:
    """Threads of verifier and drafter: a draft model gets half of the cores, anything else needs none of its own."""
    drafter = config.drafter.threads or (max(1, cores() // 2) if drafter_has_model else 1)
    rest = cores() - drafter if drafter_has_model else cores()
    return config.verifier.threads or max(1, rest), drafter


def main() -> None:
    """Read the spec from standard input; when that closes the front end is gone: leave nothing behind and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front end's to handle
    spec = msgspec.convert(json.loads(sys.stdin.readline()), WorkerSpec)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if spec.control.startswith("ipc://"):
            shutil.rmtree(Path(spec.control[len("ipc://") :]).parent, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with zmq.Context() as context:
        run_worker(spec, context)


if __name__ == "__main__":
    main()
