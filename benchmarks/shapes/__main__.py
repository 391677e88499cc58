"""`python -m benchmarks.shapes NAME --out DIR`: a published model's shape with random weights, or a GGUF file of one's
own, measured here.

Weights decide no time of a plain forward, so a shape shows what a model would cost here before anybody has its file.
They decide texts: what a round with drafts takes is measured, not how many of them are accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
import typer
from rich.console import Console

from engine.cli.command import SetOption, one_line_errors, overrides
from engine.config import load
from engine.core.errors import ConfigError
from engine.weights.draft_head import brings_head
from engine.weights.gguf.file import read_gguf

from ..measure.profile import loaded
from ..report.about import machine
from ..report.out_folder import results_in
from ..report.tables import Table
from .forwards import ForwardFigures, llama_bench, time_forwards
from .random_file import MIXES, write_random
from .served import DRAFTS, Served, round_ms, serve
from .shape import SHAPES, Shape, shape_of

T = TypeVar("T")


class Figures(msgspec.Struct):
    """What was measured of one engine. rounds: milliseconds of a round by the tokens that the model's own head has
    drafted for it; empty if there is no head or no server.
    """

    server: Served | None = None
    forwards: ForwardFigures | None = None
    rounds: dict[int, float] = {}


class Measured(msgspec.Struct):
    """A line of shapes.jsonl. layers: None for a file of one's own. figures: by engine."""

    shape: str
    layers: int | None
    weights: str
    file_gb: float
    machine: str
    settings: list[str]
    figures: dict[str, Figures]


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}; or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder for the file and for shapes.jsonl.")] = Path("out-shapes"),
    layers: Annotated[int | None, typer.Option(help="Only the first ones.", show_default="all", min=1)] = None,
    mix: Annotated[str, typer.Option(help=f"Types of the matrices: {', '.join(MIXES)}.")] = "Q4_K_M",
    tokens: Annotated[int, typer.Option(help="Of a chat's first turn.", min=100, max=8000)] = 2000,
    repeats: Annotated[int, typer.Option(help="Forwards of each kind.", min=1)] = 7,
    bench: Annotated[Path | None, typer.Option("--llama-bench", help="Its program, to compare with.")] = None,
    server: Annotated[Path | None, typer.Option("--llama-server", help="Its program, to compare with.")] = None,
    set_: SetOption = None,
) -> None:
    """Write a GGUF file of random weights in the shape of a published model, or take one of yours, and measure plain
    tokens, trees, prompts, second turns, memory and starts, beside llama.cpp if its programs are named.
    """
    with one_line_errors(), results_in(out):
        console, file = Console(stderr=True), Path(name)
        if file.suffix == ".gguf":
            if layers is not None:
                raise ConfigError("--layers: takes the first ones of a shape; leave it out for a file")
            shown: tuple[str, int | None, str] = (file.stem, None, read_gguf(file, name).kinds)
        else:
            shape = _shape_of(name, layers, mix)
            shown = (name, shape.layers, f"random weights in {mix}")
            file = _file_of(shape, out / f"{name}-{shape.layers}-layers-{mix}.gguf", mix, console)
        settings = load({}, overrides(set_, model=str(file)))
        console.print("Talon: starts, second turns")
        options = [part for text in (f"model={file}", *(set_ or [])) for part in ("--set", text)]
        talon = [sys.executable, "-m", "engine", "serve", *options]
        drafting, served = brings_head(file), serve(talon, tokens)
        console.print("Talon: forwards")
        figures = {"Talon": Figures(served, time_forwards(loaded(settings), repeats))}
        if drafting:
            console.print("Talon: rounds with its own head")
            figures["Talon"].rounds = round_ms(lambda drafts: [*talon, *_chain_of(drafts)])
        if bench is not None or server is not None:
            console.print("llama.cpp")
            figures["llama.cpp"] = other = Figures()
            threads = torch.get_num_threads()
            if bench is not None:
                other.forwards = _tried(partial(llama_bench, bench, file, threads, repeats), console)
            if server is not None:
                command = [str(server), "-m", str(file), "-t", str(threads), "-c", str(2 * tokens + 1024), "-np", "1"]
                other.server = _tried(partial(serve, command, tokens), console)
                if drafting:
                    own = [*command, "--spec-type", "draft-mtp", "--spec-draft-n-max"]
                    found = _tried(partial(round_ms, lambda drafts: [*own, str(drafts)]), console)
                    other.rounds = found or {}
        size = file.stat().st_size / 1e9
        row = Measured(*shown, size, machine(), set_ or [], figures)
        with (out / "shapes.jsonl").open("a", encoding="utf8") as rows:
            rows.write(msgspec.json.encode(row).decode() + "\n")
        print(row.machine)
        Console().print(table(row).rich())


def _chain_of(drafts: int) -> list[str]:
    """Return the options that verify a chain of so many tokens in every round, whatever it gains."""
    chain = {"policy": "dynamic", "depth": drafts, "top_k": 1}
    given = [f"drafter.growth.{key}={value}" for key, value in chain.items()]
    options = ["method=mtp", "verifier.cut=false", f"drafter.budget={drafts + 1}", *given]
    return [part for option in options for part in ("--set", option)]


def _shape_of(name: str, layers: int | None, mix: str) -> Shape:
    if name not in SHAPES:
        raise ConfigError(f"{name!r} is no shape and no GGUF file; shapes are: {', '.join(SHAPES)}")
    if mix not in MIXES:
        raise ConfigError(f"--mix {mix!r} is no mix of types; these are: {', '.join(MIXES)}")
    return shape_of(name, layers)


def _file_of(shape: Shape, file: Path, mix: str, console: Console) -> Path:
    """Return the file of a shape's random weights, written unless it is there."""
    if not file.exists():
        whole = file.with_suffix(".part")
        write_random(shape, whole, console, mix)
        whole.rename(file)
    return file


def _tried(measure: Callable[[], T], console: Console) -> T | None:
    """Return what another engine shows; None, with a line that says why, if it fails."""
    try:
        return measure()
    except ConfigError as error:
        console.print(f"llama.cpp is left out: {error}", markup=False)
        return None


def table(row: Measured) -> Table:
    """Make the table: a line for each figure, a column for each engine."""
    layers = "" if row.layers is None else f", {row.layers} layers"
    title = f"{row.shape}{layers}, {row.file_gb:.1f} GB, {row.weights}"
    figures = row.figures.values()
    rows = [[what, *map(value, figures)] for what, value in _LINES.items()]
    return Table(title, ("", *row.figures), rows)


def _of_forwards(show: Callable[[ForwardFigures], str]) -> Callable[[Figures], str]:
    return lambda figures: "-" if figures.forwards is None else show(figures.forwards)


def _of_server(show: Callable[[Served], str]) -> Callable[[Figures], str]:
    return lambda figures: "-" if figures.server is None else show(figures.server)


_LINES: dict[str, Callable[[Figures], str]] = {
    "a plain token, ms": _of_forwards(lambda f: f"{f.token_ms:.1f}"),
    "trees of 8, 16, 32 nodes, ms": _of_forwards(lambda f: ", ".join(f"{ms:.0f}" for ms in f.tree_ms.values()) or "-"),
    "a prompt of 512, tokens/s": _of_forwards(lambda f: f"{f.prompt_tokens_per_s:.0f}"),
    "second turn: tokens; read; first token, s": _of_server(
        lambda s: f"{s.whole.tokens}; {s.whole.read}; {s.whole.seconds:.2f}"
    ),
    "second turn after an aborted answer": _of_server(
        lambda s: f"{s.aborted.tokens}; {s.aborted.read}; {s.aborted.seconds:.2f}"
    ),
    f"a round with {', '.join(map(str, DRAFTS))} drafts of its own head, ms": lambda figures: (
        ", ".join(f"{ms:.0f}" for ms in figures.rounds.values()) or "-"
    ),
    "memory (PSS), MB": _of_server(lambda s: f"{s.memory_mb:.0f}"),
    "start: the first, a later one, s": _of_server(lambda s: f"{s.start_s[0]:.1f}, {s.start_s[1]:.1f}"),
}


if __name__ == "__main__":
    typer.run(main)
