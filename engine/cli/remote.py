"""`talon keys` and `talon drafter`: a drafter on another machine, joined to the verifier over tcp.

On that machine this process is the drafter's front end: it starts the drafter as a thread and prints its messages.
ZeroMQ reconnects whenever the verifier has been away.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
import zmq

from drafters.registry import check
from engine import config as configuration
from engine.cli.command import ConfigOption, SetOption, overrides, run
from engine.config import Config
from engine.core import errors
from engine.frontend.processes import STOP_S, ThreadWorker
from engine.weights.resolve import resolved
from engine.wire.keys import create
from engine.wire.messages import Failed, Heartbeat, Ready, Spans, Stop
from engine.wire.transport import Router
from engine.worker import WorkerSpec, load_keys

_POLL_S = 0.2


def keys(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Make the keys of a tcp link. Send verifier.key and drafter.key_secret to the drafter's machine over a safe
    channel.
    """

    async def main() -> None:
        create(folder)
        print(f"{folder}: verifier.key, verifier.key_secret, drafter.key, drafter.key_secret")
        print("verifier: transport: tcp, tcp.keys: this folder, tcp.remote: true")
        print("drafter: a folder with verifier.key and drafter.key_secret")

    run(main())


def drafter(
    connect: Annotated[str, typer.Option(metavar="tcp://HOST:PORT", help="Where the verifier is (its tcp.endpoint).")],
    config: ConfigOption = configuration.DEMO,
    keys: Annotated[Path | None, typer.Option(metavar="DIR", help="The drafter's keys.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Go without keys.")] = False,
    set_: SetOption = None,
) -> None:
    """Draft for a verifier on another machine, until Ctrl-C."""
    link = {"transport": "tcp", "tcp.endpoint": connect, "tcp.remote": True, "tcp.insecure": insecure or None}

    async def main() -> None:
        given = overrides(set_, **link, **{"tcp.keys": str(keys) if keys else None})
        await serve(resolved(configuration.load(config, given)))

    run(main())


async def serve(config: Config) -> None:
    """Draft for the verifier at `config.tcp.endpoint`. Raises the error that ends the drafter."""
    load_keys(config, "drafter")
    check(config)
    name = f"drafter-{uuid.uuid4().hex[:12]}"
    control = f"inproc://{name}"
    with zmq.Context() as context, closing(Router(context, control, (Ready, Failed, Heartbeat, Spans))) as hub:
        spec = WorkerSpec("drafter", name, control, config.tcp.endpoint, config.model_dump(mode="json"))
        worker = ThreadWorker(spec, context)
        try:
            alive = True
            while alive:
                alive = worker.alive()  # checked first, so that its last messages are still read
                for _, message, _ in hub.received():
                    if isinstance(message, Ready):
                        print(f"talon: {config.method} is ready and joins {config.tcp.endpoint}", file=sys.stderr)
                    elif isinstance(message, Failed):
                        raise getattr(errors, message.kind)(message.text)
                await asyncio.sleep(_POLL_S)
            raise errors.WorkerDied("the drafter ended: its error stands above")
        finally:
            hub.send(name, Stop())
            worker.end(STOP_S)
