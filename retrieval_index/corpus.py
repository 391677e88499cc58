"""Input files of an index: text or JSON lines, read as documents and tokenised."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.json_lines import BadLine, json_lines
from retrieval_index.datastore import DatastoreError

_BATCH = 64  # documents tokenised at a time
_PIECE = 200_000  # characters of a document tokenised at a time


class _Row(msgspec.Struct):
    text: str


def tokenised(tokenizer: Any, inputs: Sequence[Path], skip: int, separator: int) -> Iterator[NDArray[np.uint32]]:
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
    """The texts of a file that are not blank: the `text` of each line of .jsonl, else the whole; .xz and .gz are
    unpacked."""
    unpack: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    name = path.name.removesuffix(path.suffix) if path.suffix in (".xz", ".gz") else path.name
    try:
        file: IO[bytes]
        with unpack(path, "rb") as file:
            if name.endswith((".jsonl", ".json")):
                yield from (row.text for _, row in json_lines(file, _Row) if row.text.strip())
                return
            text = io.TextIOWrapper(file, encoding="utf-8-sig").read()
            if "\0" in text:
                raise DatastoreError(f"input={path}: is binary: give text or JSON lines")
            if text.strip():
                yield text
    except BadLine as error:
        raise DatastoreError(f'input={path}: {error}: need {{"text": ...}}') from None
    except (UnicodeDecodeError, lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile):
        raise DatastoreError(f"input={path}: is binary or damaged: give text or JSON lines in UTF-8") from None
