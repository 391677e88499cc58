"""The `talon` command."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from engine import config as configuration
from engine.errors import TalonError
from engine.launch import POOL_WAITS
from engine.sampling import SamplingParams

T = TypeVar("T")
app = typer.Typer(
    help="Talon: faster answers from large language models, not one token changed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ConfigOption = Annotated[Path, typer.Option("--config", help="YAML file, see configs/.", show_default="the demo model")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any configuration key: drafter.budget=40"),
]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MODELS_OWN = "the model's own"


def overrides(assignments: list[str] | None, **named: Any) -> dict[str, Any]:
    """Configuration overrides from --set and from options that name a key; what was not given is left out."""
    values = dict(configuration.parse_assignment(text) for text in assignments or [])
    return values | {key: value for key, value in named.items() if value is not None}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors of ours are one line and exit code 2, Ctrl-C is exit code 130."""
    try:
        yield
    except TalonError as error:
        print(f"talon: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        print(f"talon: {error.filename or 'output'}: the disk is full: make room and run again", file=sys.stderr)
        _forget_output()
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end; Ctrl-C cleans up."""
    with one_line_errors():
        return asyncio.run(main)


def _forget_output() -> None:
    """What is still to be written to standard output would fail once more when the process ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@app.command()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(help="The question, - for standard input; sent as one user message through the chat template."),
    ],
    config: ConfigOption = configuration.DEMO,
    method: Annotated[
        str | None,
        typer.Option(help="Who drafts: none, pld, suffix, eagle3, hybrid, ...; a wrong name lists them all."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens of this much probability.", show_default=MODELS_OWN)
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.", show_default=MODELS_OWN),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens of this share of the likeliest one's probability.", show_default=MODELS_OWN),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Over 1, discourage tokens already in prompt and answer.", show_default=MODELS_OWN),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text with every method and mode.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="Drafter and verifier in turns or at once: sequential, async, auto.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what each worker did when, for Perfetto and `talon timeline`.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Answer a prompt, streaming the text; a summary line follows on standard error."""

    async def main() -> None:
        from engine.api import Engine

        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
        ).validate()
        given = overrides(set_, method=method, mode=mode, trace=str(trace) if trace else None)
        asked = sys.stdin.read() if prompt == "-" else prompt
        # for one answer nobody stands by: its imports would take the time that the answer needs
        async with (
            await Engine.start(config, **{"drafter.standby": False} | given) as engine,
            engine.stream(asked, sampling, raw=raw) as stream,
        ):
            async for piece in stream:
                if not as_json:
                    print(piece.text, end="", flush=True)
        result = stream.result
        assert result is not None
        if as_json:
            shown = {key: value for key, value in msgspec.to_builtins(result).items() if key != "rounds"}
            print(msgspec.json.encode(shown).decode())
            return
        metrics = result.metrics
        print(flush=True)
        print(
            f"[{len(result.token_ids)} tokens, {metrics.tokens_per_second:.1f} tokens/s, "
            f"MAT {metrics.mean_accepted_tokens:.2f}, verifier busy {metrics.verifier_busy:.0%}, "
            f"{engine.config.method}, {result.finish_reason}{engine.config.simulation}]",
            file=sys.stderr,
        )

    run(main())


def assemble() -> typer.Typer:
    """The command with all its subcommands. `engine.__main__` calls it."""
    for key, value in POOL_WAITS.items():
        os.environ.setdefault(key, value)  # for workers that are threads
    from benchmarks.commands import bench, check, qa, report
    from benchmarks.index_speed import index_speed
    from benchmarks.profile import profile
    from benchmarks.replay import replay
    from benchmarks.shapes import shapes
    from benchmarks.timeline import timeline
    from drafters.training.cli import app as train
    from engine.model.commands import app as models
    from engine.remote import drafter, keys
    from retrieval_index.commands import app as index

    app.command()(bench)
    app.command()(check)
    app.command()(report)
    app.command()(qa)
    app.command()(replay)
    app.command()(shapes)
    app.command()(profile)
    app.command()(timeline)
    index.command("speed")(index_speed)
    app.command()(keys)
    app.command()(drafter)
    app.add_typer(models, name="models")
    app.add_typer(index, name="index")
    app.add_typer(train, name="train")
    return app


def main() -> None:
    """The command, as `python -m engine.cli`."""
    assemble()()


if __name__ == "__main__":
    main()
