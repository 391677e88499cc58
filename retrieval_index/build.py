"""Building a datastore: tokenise, cut into shards, sort their suffixes.

Every file appears whole or not at all, and the progress records how far into the input each finished shard reaches, so
a killed build resumes there. A builder's lock dies with its process.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.files.whole_file import write_whole
from retrieval_index.corpus import tokenised
from retrieval_index.datastore import (
    HEADER,
    MAGIC,
    VERSION,
    DatastoreError,
    Header,
    Shard,
    checksum,
    fingerprint,
    library,
)

SHARD_TOKENS = 32_000_000
PROGRESS = "progress.json"


class Begun(msgspec.Struct):
    """The progress of a build. inputs: what is being built and how, to detect changes."""

    inputs: list[str]


class Progress(Begun):
    """How far a datastore is built. documents: how many whole documents the shards hold; tokens: how many tokens of the
    next document they hold.
    """

    shards: list[Shard] = msgspec.field(default_factory=list)
    documents: int = 0
    tokens: int = 0


P = TypeVar("P", bound=Begun)


def build(
    tokenizer: Any,
    inputs: Sequence[Path],
    out: Path,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[int], None] = lambda tokens: None,
) -> Header:
    """Build, or resume, the datastore `out` from text and JSON-lines files. report: called with tokens read."""
    library("pydivsufsort")  # where it is missing, that is told before the files are read
    with building_in(out):
        return _build(tokenizer, inputs, out, shard_tokens, report)


def _build(
    tokenizer: Any, inputs: Sequence[Path], out: Path, shard_tokens: int, report: Callable[[int], None]
) -> Header:
    width = 2 if len(tokenizer) < 0xFFFF else 4
    separator = (1 << 8 * width) - 1
    mark = fingerprint(tokenizer)
    progress = resume(out / PROGRESS, Progress([*described(inputs), mark, str(shard_tokens)]))
    buffer: list[NDArray[np.uint32]] = []
    held, documents = 0, 0

    def flush(document: int, token: int) -> None:
        nonlocal held
        if not progress.shards:  # a half-written first shard is then known to be this build's
            write_whole(out / PROGRESS, msgspec.json.encode(progress))
        shard = write_shard(out, len(progress.shards), np.concatenate(buffer), width)
        progress.shards.append(shard)
        progress.documents, progress.tokens = document, token
        write_whole(out / PROGRESS, msgspec.json.encode(progress))
        buffer.clear()
        held = 0

    for documents, text in enumerate(tokenised(tokenizer, inputs, progress.documents, separator), progress.documents):
        at = progress.tokens if documents == progress.documents else 0
        while at < len(text):
            piece = text[at : at + shard_tokens - held]
            buffer.append(piece)
            held += len(piece)
            at += len(piece)
            report(len(piece))
            if held == shard_tokens:
                flush(documents, at)
    if held:
        flush(documents + 1, 0)
    if not progress.shards:
        raise DatastoreError(f"input={', '.join(map(str, inputs))}: holds no text")
    header = Header(MAGIC, VERSION, mark, width, progress.shards)
    write_whole(out / HEADER, msgspec.json.encode(header))
    return header


def described(inputs: Sequence[Path]) -> list[str]:
    """Return the input files' paths, sizes and times, so that a later build can tell whether they are
    still the same.
    """
    return [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in inputs]


def resume(path: Path, fresh: P) -> P:
    """Return the progress of an earlier run over the same inputs, or `fresh`; another build's files are not touched."""
    if not path.exists():
        if any(path.parent.glob("*.tokens")) or (path.parent / HEADER).exists():
            raise DatastoreError(f"{path.parent}: holds another index: name an empty folder")
        return fresh
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=type(fresh))
    except msgspec.DecodeError:
        raise DatastoreError(f"{path}: damaged: delete the folder and build again") from None
    if progress.inputs != fresh.inputs:
        raise DatastoreError(f"{path.parent}: begun with other inputs or another tokenizer: name an empty folder")
    return progress


def write_shard(out: Path, number: int, tokens: NDArray[np.uint32], width: int) -> Shard:
    """Write both files of a shard. Suffixes are sorted by token values: as bytes, with the high byte first."""
    divsufsort = library("pydivsufsort").divsufsort
    stored = tokens.astype(f"<u{width}")
    suffixes = divsufsort(stored.astype(f">u{width}").view(np.uint8))
    suffixes = (suffixes[suffixes % width == 0] // width).astype("<i4")
    name = f"{number:04d}"
    crcs = []
    for kind, array in (("tokens", stored), ("suffixes", suffixes)):
        path = out / f"{name}.{kind}"
        write_whole(path, array.tobytes())
        crcs.append(checksum(path))
    return Shard(name, len(tokens), crcs[0], crcs[1])


@contextmanager
def building_in(out: Path) -> Iterator[None]:
    """Create the folder and lock it; an error with its files becomes a DatastoreError that says what to do."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DatastoreError(
                    f"{out}: another process is building here: wait for it or name another folder"
                ) from None
            for half_written in out.glob("*.tmp"):  # left by a killed builder
                half_written.unlink()
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DatastoreError(f"{out}: disk full: make room and run the same command again") from None
        raise DatastoreError(f"{error.filename or out}: {error.strerror or error}") from None
