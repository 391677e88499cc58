"""Building a datastore: tokenise, cut into shards, sort their suffixes.

Every file appears whole or not at all, and each finished shard is noted with how far into the input it reaches: a
build that was killed goes on there. The lock of a builder dies with its process.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from retrieval_index.datastore import HEADER, MAGIC, VERSION, DatastoreError, Header, Shard, checksum, fingerprint

SHARD_TOKENS = 32_000_000
_BATCH = 64  # documents tokenised at a time
_PIECE = 200_000  # characters of a document tokenised at a time


class Progress(msgspec.Struct):
    """inputs: what is being built, to notice that it changed. documents: how many the shards hold whole; tokens: of the
    next one, how many."""

    inputs: list[str]
    shards: list[Shard]
    documents: int = 0
    tokens: int = 0


def build(
    tokenizer: Any,
    inputs: Sequence[Path],
    out: Path,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[int], None] = lambda tokens: None,
) -> Header:
    """Build, or go on building, the datastore `out` from text and JSON-lines files. report: called with tokens read."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            return _build(tokenizer, inputs, out, shard_tokens, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DatastoreError(f"{out}: disk full: make room and run the same command again, it goes on") from None
        raise DatastoreError(f"{error.filename or out}: {error.strerror or error}") from None


def _build(
    tokenizer: Any, inputs: Sequence[Path], out: Path, shard_tokens: int, report: Callable[[int], None]
) -> Header:
    width = 2 if len(tokenizer) < 0xFFFF else 4
    separator = (1 << 8 * width) - 1
    mark = fingerprint(tokenizer)
    described = [f"{p.resolve()} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in inputs]
    described += [mark, str(shard_tokens)]
    progress = _resume(out / "progress.json", described)
    buffer: list[NDArray[np.uint32]] = []
    held, documents = 0, 0

    def flush(document: int, token: int) -> None:
        nonlocal held
        shard = _write_shard(out, len(progress.shards), np.concatenate(buffer), width)
        progress.shards.append(shard)
        progress.documents, progress.tokens = document, token
        _write(out / "progress.json", msgspec.json.encode(progress))
        buffer.clear()
        held = 0

    for documents, text in enumerate(_tokenised(tokenizer, inputs, progress.documents, separator), progress.documents):
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
    _write(out / HEADER, msgspec.json.encode(header))
    return header


def _resume(path: Path, inputs: list[str]) -> Progress:
    """The progress of an earlier run over the same inputs, or none; what another build left is not touched."""
    if not path.exists():
        if any(path.parent.glob("*.tokens")) or (path.parent / HEADER).exists():
            raise DatastoreError(f"{path.parent}: holds another datastore: name an empty folder")
        return Progress(inputs, [])
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    except msgspec.DecodeError:
        raise DatastoreError(f"{path}: damaged: delete the folder and build again") from None
    if progress.inputs != inputs:
        raise DatastoreError(f"{path.parent}: begun with other inputs or another tokenizer: name an empty folder")
    return progress


def _write_shard(out: Path, number: int, tokens: NDArray[np.uint32], width: int) -> Shard:
    """Both files of a shard. Suffixes sort by their tokens' values: as the bytes do, the high one first."""
    from pydivsufsort import divsufsort

    stored = tokens.astype(f"<u{width}")
    suffixes = divsufsort(stored.astype(f">u{width}").view(np.uint8))
    suffixes = (suffixes[suffixes % width == 0] // width).astype("<i4")
    name = f"{number:04d}"
    crcs = []
    for kind, array in (("tokens", stored), ("suffixes", suffixes)):
        path = out / f"{name}.{kind}"
        _write(path, array.tobytes())
        crcs.append(checksum(path))
    return Shard(name, len(tokens), crcs[0], crcs[1])


def _write(path: Path, content: bytes) -> None:
    """All or nothing, and on the disk before it has its name."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    with open(out / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DatastoreError(
                f"{out}: another process is building here: wait for it or name another folder"
            ) from None
        yield


def _tokenised(tokenizer: Any, inputs: Sequence[Path], skip: int, separator: int) -> Iterator[NDArray[np.uint32]]:
    """The documents from number `skip` on as token ids, a separator at their ends."""
    batch: list[str] = []
    for number, document in enumerate(text for path in inputs for text in _documents(path)):
        if number < skip:
            continue
        batch.append(document)
        if len(batch) == _BATCH or len(document) > _PIECE:
            yield from _encode(tokenizer, batch, separator)
            batch = []
    if batch:
        yield from _encode(tokenizer, batch, separator)


def _encode(tokenizer: Any, batch: list[str], separator: int) -> Iterator[NDArray[np.uint32]]:
    for document in batch:
        pieces = [document[i : i + _PIECE] for i in range(0, len(document), _PIECE)]
        ids = [i for row in tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"] for i in row]
        yield np.asarray([*ids, separator], np.uint32)


def _documents(path: Path) -> Iterator[str]:
    """The texts of a file: the `text` of each line of .jsonl, else the whole; .xz and .gz are unpacked."""
    unpack: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    name = path.name.removesuffix(path.suffix) if path.suffix in (".xz", ".gz") else path.name
    try:
        file: IO[str]
        with unpack(path, "rt", encoding="utf8") as file:
            if not name.endswith((".jsonl", ".json")):
                text = file.read()
                if "\0" in text:
                    raise DatastoreError(f"input={path}: is binary: give text or JSON lines")
                if text.strip():
                    yield text
                return
            for number, line in enumerate(file, start=1):
                try:
                    yield json.loads(line)["text"]
                except (ValueError, TypeError, KeyError):
                    raise DatastoreError(f'input={path}: line {number}: need {{"text": ...}}') from None
    except (UnicodeDecodeError, lzma.LZMAError, EOFError, gzip.BadGzipFile):
        raise DatastoreError(f"input={path}: is binary or damaged: give text or JSON lines in UTF-8") from None
