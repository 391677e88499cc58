"""`talon index`: build, inspect and ask a datastore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import ConfigError, TalonError

app = typer.Typer(help="Datastores: a corpus on disk that drafts.", no_args_is_help=True)

TokenizerOption = Annotated[Path, typer.Option(help="Directory of the target's tokenizer.")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except TalonError as error:
        typer.echo(f"talon: {error}", err=True)
        raise typer.Exit(2) from None


def _load(tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    if not (tokenizer / "tokenizer.json").is_file() and not (tokenizer / "tokenizer_config.json").is_file():
        raise ConfigError(f"tokenizer={tokenizer}: no tokenizer there; name a directory with a tokenizer.json")
    return AutoTokenizer.from_pretrained(tokenizer)


@app.command()
def build(
    tokenizer: TokenizerOption,
    input: Annotated[list[Path], typer.Option(help="Text or JSON lines with `text`, also .xz or .gz; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder of the datastore; a killed build goes on there.")],
    shard_tokens: Annotated[int, typer.Option(help="Tokens sorted at a time, 13 bytes each.", min=1000)] = 32_000_000,
) -> None:
    """Build a datastore. Run again after a crash: it goes on where it was."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from retrieval_index.build import build as build_datastore

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} tokens"), TimeElapsedColumn())
    with _one_line_errors(), Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("build", total=None)
        header = build_datastore(_load(tokenizer), input, out, shard_tokens, lambda n: progress.advance(task, n))
    typer.echo(f"{out}: {sum(s.tokens for s in header.shards):,} tokens in {len(header.shards)} shards")


@app.command()
def info(
    folder: Path, verify: Annotated[bool, typer.Option(help="Read everything, compare checksums.")] = True
) -> None:
    """What a datastore holds, and whether its files are intact."""
    from retrieval_index.datastore import Datastore

    with _one_line_errors():
        store = Datastore(folder)
        if verify:
            store.verify()
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"tokens     {store.tokens:,}\nshards     {len(store.shards)}\nbytes      {size:,}")
    typer.echo(f"tokenizer  {store.header.tokenizer}\nchecksums  {'match' if verify else 'not read'}")


@app.command()
def query(
    folder: Path, text: str, tokenizer: TokenizerOption, count: Annotated[int, typer.Option(help="Lines.")] = 8
) -> None:
    """What followed the longest match of a text's end."""
    from retrieval_index.datastore import Datastore

    with _one_line_errors():
        words = _load(tokenizer)
        length, rows = Datastore(folder, words).continuations(words.encode(text, add_special_tokens=False))
    typer.echo(f"matched {length} tokens, {len(rows)} continuations")
    for row in rows[:count]:
        typer.echo(f"  {words.decode(row[row >= 0])!r}")
