"""The dense index finds passages by what they are about, even if none of the question's wording occurs in them.

A directory holds `header.json`, written last, and the files named in FILES. `retrieval_index.embedding` says how texts
become vectors; the index holds all that this needs, so it can be queried without a model. It stays valid for any target
with the same tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from retrieval_index.datastore import HEADER, DatastoreError, checksum, fingerprint, library
from retrieval_index.embedding import TextEmbedding

VERSION = 1
MAGIC = "talon-dense"
FILES = ("passages.tokens", "passages.starts", "embedding.tokens", "embedding.common", "index.faiss")
PROBED = 4  # one cell in so many is searched: recall@5 of 60,305 passages is 0.39; with one in eight, 0.36


class DenseHeader(msgspec.Struct):
    """What a dense index's directory says of itself. tokenizer: its fingerprint. width: bytes of a passage's token.
    sizes, crcs: of FILES, bytes and CRC-32.
    """

    magic: str
    version: int
    tokenizer: str
    width: int
    passages: int
    dimensions: int
    sizes: dict[str, int]
    crcs: dict[str, int]


@dataclass(frozen=True)
class Passage:
    """A passage that was found. number: its place in the corpus. score: the cosine between its vector and the
    question's.
    """

    number: int
    score: float
    tokens: list[int]


def is_dense(folder: Path) -> bool:
    """Return whether a folder's header says that it is a dense index; opening it shows whether it is intact."""
    try:
        return bool(msgspec.json.decode((folder / HEADER).read_bytes())["magic"] == MAGIC)
    except (OSError, msgspec.DecodeError, TypeError, LookupError):
        return False


class DenseIndex:
    """Finds the passages most similar to a text. Opening maps the tables, and reads the vectors after
    their checksum.
    """

    def __init__(self, folder: Path, tokenizer: Any = None):
        self.folder = folder
        self.header = read_header(folder)
        if tokenizer is not None and fingerprint(tokenizer) != self.header.tokenizer:
            raise DatastoreError(f"{folder}: built with another tokenizer: build it again with the target's")
        for name in FILES:
            if not (folder / name).is_file() or (folder / name).stat().st_size != self.header.sizes[name]:
                raise DatastoreError(f"{folder / name}: missing or truncated: build the index again")
        self._tokens = self._map("passages.tokens", np.uint16 if self.header.width == 2 else np.uint32)
        self._starts = self._map("passages.starts", np.int64)
        ordered = len(self._starts) == self.header.passages + 1 and (np.diff(self._starts) >= 0).all()
        if not ordered or self._starts[0] < 0 or self._starts[-1] > len(self._tokens):
            raise DatastoreError(f"{folder / 'passages.starts'}: damaged: build the index again")
        words = self._map("embedding.tokens", np.float16).reshape(-1, self.header.dimensions)
        self.embed = TextEmbedding(words, np.array(self._map("embedding.common", np.float32)))
        self._check("index.faiss")  # faiss trusts the file, so its checksum comes first
        self._index = _read_faiss(folder / "index.faiss")
        if (self._index.ntotal, self._index.d) != (self.header.passages, self.header.dimensions):
            raise DatastoreError(f"{folder}: index.faiss is another index's: build the index again")

    def query(self, text: Sequence[int], count: int = 4) -> list[Passage]:
        """Return the `count` passages most similar to `text`, a list of token ids, the best first."""
        known = [token for token in text if token < len(self.embed.tokens)]
        scores, found = self._index.search(self.embed([known]), min(count, self.header.passages))
        return [
            Passage(int(i), float(s), self.passage(int(i))) for s, i in zip(scores[0], found[0], strict=True) if i >= 0
        ]

    def passage(self, number: int) -> list[int]:
        """Return the tokens of one passage."""
        tokens: list[int] = self._tokens[self._starts[number] : self._starts[number + 1]].tolist()
        return tokens

    def verify(self) -> None:
        """Read everything and compare checksums; DatastoreError names the file that is damaged."""
        for name in FILES:
            self._check(name)

    def _check(self, name: str) -> None:
        if checksum(self.folder / name) != self.header.crcs[name]:
            raise DatastoreError(f"{self.folder / name}: damaged: build the index again")

    def _map(self, name: str, dtype: Any) -> NDArray[Any]:
        return np.asarray(np.memmap(self.folder / name, dtype, mode="r"))


def read_header(folder: Path) -> DenseHeader:
    """Read the header of the dense index in a folder."""
    try:
        header = msgspec.json.decode((folder / HEADER).read_bytes(), type=DenseHeader)
    except OSError as error:
        raise DatastoreError(
            f"{folder}: not a dense index ({error.strerror}): run `talon index build --dense`"
        ) from None
    except msgspec.DecodeError:
        raise DatastoreError(f"{folder}: {HEADER} is not a dense index's: build it with --dense") from None
    named = set(FILES) == set(header.sizes) == set(header.crcs)
    if header.magic != MAGIC or header.version != VERSION or header.width not in (2, 4) or not named:
        raise DatastoreError(f"{folder}: made by another version of the format: build it again")
    return header


def _read_faiss(path: Path) -> Any:
    faiss = library("faiss")
    try:
        index = faiss.read_index(str(path))
    except RuntimeError:
        raise DatastoreError(f"{path}: not read by this faiss: build the index again") from None
    if isinstance(index, faiss.IndexIVF):
        index.nprobe = -(-index.nlist // PROBED)
    return index
