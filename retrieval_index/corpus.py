"""Input files of an index: text or JSON lines, read as documents and tokenised."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import RequestError
from engine.files.json_lines import BadLine, json_lines
from engine.text.encode import encode_text
from retrieval_index.datastore import DatastoreError
from retrieval_index.session_index import CONTEXT

_PIECE = 200_000  # characters of a document tokenised at a time


class _Row(msgspec.Struct):
    """A document's text, or a model's answer as token ids, optionally with the prompt that it answers."""

    text: str | None = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]] | int | None = None  # a number is a count, and is ignored
    prompt: Any = None  # a text, or chat messages; anything else is ignored

    def __post_init__(self) -> None:
        if self.text is None and not isinstance(self.tokens, list):
            raise ValueError("neither text nor tokens")


def tokenised(tokenizer: Any, inputs: Sequence[Path], skip: int, separator: int) -> Iterator[NDArray[np.uint32]]:
    """Yield the documents from number `skip` on as token ids, each ending with a separator."""
    documents = (row for path in inputs for row in _documents(path, len(tokenizer)))
    for row in islice(documents, skip, None):
        yield np.concatenate([*_ids(tokenizer, row), np.asarray([separator], np.uint32)])


def _ids(tokenizer: Any, row: _Row) -> Iterator[NDArray[np.uint32]]:
    """Yield a row's token ids in parts: as Python's integers those of a large file would not fit into memory. An answer
    begins with the end of its prompt, so that its first tokens have a context.
    """
    if isinstance(row.tokens, list):
        before: list[int] = []
        if row.prompt and isinstance(row.prompt, str | list):
            with suppress(RequestError):  # a list of something other than chat messages
                before = encode_text(tokenizer, row.prompt)[-CONTEXT:]
        yield np.asarray([*before, *row.tokens], np.uint32)
        return
    text = row.text or ""
    for at in range(0, len(text), _PIECE):
        ids = tokenizer(text[at : at + _PIECE], add_special_tokens=False, verbose=False)["input_ids"]
        yield np.asarray(ids, np.uint32)


def _documents(path: Path, vocab: int) -> Iterator[_Row]:
    """Yield a file's documents that are not blank: each line of .jsonl, else the whole file; .xz and .gz
    are unpacked.
    """
    unpack: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    name = path.name.removesuffix(path.suffix) if path.suffix in (".xz", ".gz") else path.name
    try:
        file: IO[bytes]
        with unpack(path, "rb") as file:
            if name.endswith((".jsonl", ".json")):
                yield from _rows(file, vocab)
                return
            text = io.TextIOWrapper(file, encoding="utf-8-sig").read()
            if "\0" in text:
                raise DatastoreError(f"input={path}: is binary: give text or JSON lines")
            if text.strip():
                yield _Row(text)
    except BadLine as error:
        raise DatastoreError(f'input={path}: {error}: need {{"text": ...}} or {{"tokens": [...]}}') from None
    except (UnicodeDecodeError, lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile):
        raise DatastoreError(f"input={path}: is binary or damaged: give text or JSON lines in UTF-8") from None


def _rows(file: Iterable[bytes], vocab: int) -> Iterator[_Row]:
    for number, row in json_lines(file, _Row):
        if isinstance(row.tokens, list):
            if max(row.tokens, default=0) >= vocab:
                raise BadLine(number, f"token {max(row.tokens)} is beyond the tokenizer's {vocab}")
            if row.tokens:
                yield row
        elif row.text and row.text.strip():
            yield row
