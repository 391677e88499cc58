"""`talon index` builds, inspects and queries a datastore or a dense index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.command import one_line_errors
from engine.core.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from retrieval_index.dense import DenseHeader

app = typer.Typer(help="Indexes: a corpus on disk that drafts.", no_args_is_help=True)

TokenizerOption = Annotated[
    Path, typer.Option(help="Directory of the target's tokenizer; with --dense, of the target.")
]


def tokenizer_folder(tokenizer: Path) -> Path:
    """Return the directory that --tokenizer means; ConfigError if there is no tokenizer in it."""
    from engine.weights.resolve import resolve

    folder = Path(resolve(str(tokenizer), "tokenizer"))
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"tokenizer={tokenizer}: no tokenizer there; name a directory with a tokenizer.json")
    return folder


def find_tokenizer(tokenizer: Path) -> Any:
    """Load the tokenizer in a directory; ConfigError if there is none."""
    from engine.weights.tokenizer import load_tokenizer

    try:
        return load_tokenizer(str(tokenizer_folder(tokenizer)))
    except ModelError as error:
        raise ConfigError(str(error).replace("model=", "tokenizer=", 1)) from None


@app.command()
def build(
    tokenizer: TokenizerOption,
    input: Annotated[
        list[Path],
        typer.Option(help="Text, or JSON lines with `text` or, of an answer, `tokens`; also .xz or .gz; repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the index; a killed build goes on there.")],
    dense: Annotated[
        bool, typer.Option("--dense", help="Index what passages are about, not their every word.")
    ] = False,
) -> None:
    """Build a datastore or a dense index. Run again after a crash, it resumes where it stopped."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from retrieval_index.build import build as build_datastore

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} tokens"), TimeElapsedColumn())
    with one_line_errors():
        folder = tokenizer_folder(tokenizer)
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("build", total=None)
            words, report = find_tokenizer(folder), partial(progress.advance, task)
            if dense:
                done = f"{_build_dense(folder, words, input, out, report).passages:,} passages"
            else:
                shards = build_datastore(words, input, out, report=report).shards
                done = f"{sum(shard.tokens for shard in shards):,} tokens in {len(shards)} shards"
    typer.echo(f"{out}: {done}")


def _build_dense(
    target: Path, tokenizer: Any, inputs: list[Path], out: Path, report: Callable[[int], None]
) -> DenseHeader:
    from drafters.heads.checkpoint import TargetWeights
    from drafters.heads.matrices import numbers
    from retrieval_index.dense_build import build_dense

    embedding = numbers(TargetWeights.read(str(target)).embedding).float().numpy()
    return build_dense(tokenizer, embedding, inputs, out, report=report)


@app.command()
def info(
    folder: Path, verify: Annotated[bool, typer.Option(help="Read everything, compare checksums.")] = True
) -> None:
    """Show what an index holds, and whether its files are intact."""
    from retrieval_index.datastore import Datastore
    from retrieval_index.dense import DenseIndex, is_dense

    with one_line_errors():
        store = DenseIndex(folder) if is_dense(folder) else Datastore(folder)
        if verify:
            store.verify()
    size = sum(file.stat().st_size for file in folder.iterdir())
    if isinstance(store, DenseIndex):
        typer.echo(f"passages   {store.header.passages:,}\ndimensions {store.header.dimensions}")
    else:
        typer.echo(f"tokens     {store.tokens:,}\nshards     {len(store.shards)}")
    typer.echo(f"bytes      {size:,}")
    typer.echo(f"tokenizer  {store.header.tokenizer}\nchecksums  {'match' if verify else 'not read'}")


@app.command()
def query(
    folder: Path, text: str, tokenizer: TokenizerOption, count: Annotated[int, typer.Option(help="Lines.", min=1)] = 8
) -> None:
    """Show what followed the longest match of a text's end, or the passages most similar to a text."""
    from retrieval_index.datastore import Datastore
    from retrieval_index.dense import DenseIndex, is_dense

    with one_line_errors():
        words = find_tokenizer(tokenizer)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"text={text!r}: holds half a character; decode what it comes from as UTF-8")
        tokens = words.encode(text, add_special_tokens=False)
        if is_dense(folder):
            for passage in DenseIndex(folder, words).query(tokens, count):
                typer.echo(f"{passage.score:.3f}  {words.decode(passage.tokens)!r}")
            return
        length, rows = Datastore(folder, words).continuations(tokens)
    typer.echo(f"matched {length} tokens, {len(rows)} continuations")
    for row in rows[:count]:
        typer.echo(f"  {words.decode(row[row >= 0])!r}")
