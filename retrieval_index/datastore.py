"""The datastore: a static corpus of tokens on disk, memory-mapped and searched by suffix array.

A directory holds `header.json`, written last, and for each shard `NNNN.tokens` and `NNNN.suffixes`. Any number of
processes may open it; nothing writes to it once its header exists.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import TalonError
from retrieval_index.compiler import release_compiler

VERSION = 1
MAGIC = "talon-datastore"
HEADER = "header.json"


class DatastoreError(TalonError):
    """A datastore cannot be built or opened."""


class Shard(msgspec.Struct):
    """A part of the corpus with its own suffixes. tokens: how many tokens the shard holds. *_crc: CRC-32 of the two
    files.
    """

    name: str
    tokens: int
    tokens_crc: int
    suffixes_crc: int


class Header(msgspec.Struct):
    """What a datastore's directory says of itself. width: bytes of a token; the largest value of that width separates
    documents. tokenizer: its fingerprint.
    """

    magic: str
    version: int
    tokenizer: str
    width: int
    shards: list[Shard]


def fingerprint(tokenizer: Any) -> str:
    """Identify a vocabulary: two tokenizers of the same fingerprint give a token id the same meaning."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token_id}\t{token}\n".encode("utf8", "surrogatepass"))
    return digest.hexdigest()[:32]


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


class Datastore:
    """Finds what followed the longest match of a context in the corpus. Opening maps the files, and reads the suffixes
    once, because kernels trust them as indices.
    """

    def __init__(self, folder: Path, tokenizer: Any = None):
        self.folder = folder
        try:
            self.header = msgspec.json.decode((folder / HEADER).read_bytes(), type=Header)
        except OSError as error:
            raise DatastoreError(f"{folder}: not a datastore ({error.strerror}): run `talon index build`") from None
        except msgspec.DecodeError:
            raise DatastoreError(f"{folder}: {HEADER} is not a datastore's: build it again") from None
        if self.header.magic != MAGIC or self.header.version != VERSION or self.header.width not in (2, 4):
            raise DatastoreError(f"{folder}: made by another version of the format: build it again")
        if tokenizer is not None and fingerprint(tokenizer) != self.header.tokenizer:
            raise DatastoreError(f"{folder}: built with another tokenizer: build it again with the target's")
        if not self.header.shards or any(shard.tokens < 1 for shard in self.header.shards):
            raise DatastoreError(f"{folder}: {HEADER} names no tokens: build it again")
        self.separator = (1 << 8 * self.header.width) - 1
        token_type = np.uint16 if self.header.width == 2 else np.uint32
        self.shards = [
            (self._map(shard, "tokens", token_type), self._map(shard, "suffixes", np.int32))
            for shard in self.header.shards
        ]
        for shard, (tokens, suffixes) in zip(self.header.shards, self.shards, strict=True):
            if suffixes.view(np.uint32).max() >= len(tokens):  # as unsigned numbers, negative ones are too large
                raise self._damaged(shard, "suffixes")

    @property
    def tokens(self) -> int:
        """The number of tokens in the corpus, separators included."""
        return sum(shard.tokens for shard in self.header.shards)

    def texts(self) -> Iterator[NDArray[np.int32]]:
        """Yield the corpus, shard by shard, -1 after each text. Raises DatastoreError if it is not what was written."""
        for shard, (tokens, _) in zip(self.header.shards, self.shards, strict=True):
            if zlib.crc32(tokens.data) != shard.tokens_crc:
                raise self._damaged(shard, "tokens")
            texts = tokens.astype(np.int32)
            texts[tokens == self.separator] = -1
            yield texts

    def verify(self) -> None:
        """Read everything and compare checksums; DatastoreError names the file that is damaged."""
        for shard in self.header.shards:
            for kind, expected in (("tokens", shard.tokens_crc), ("suffixes", shard.suffixes_crc)):
                if checksum(self.folder / f"{shard.name}.{kind}") != expected:
                    raise self._damaged(shard, kind)

    def _damaged(self, shard: Shard, kind: str) -> DatastoreError:
        return DatastoreError(f"{self.folder / shard.name}.{kind}: damaged: build the datastore again")

    def prepare(self) -> None:
        """Load the kernels now, which takes a second, or ten the first time, and release their compiler."""
        from retrieval_index.suffix_array import likeliest

        tokens, _ = self.shards[0]
        _, rows = self.continuations(tokens[:1].tolist(), shortest=1)
        likeliest(rows, 0, 1)
        release_compiler()

    def continuations(
        self, context: Sequence[int], longest: int = 16, shortest: int = 2, depth: int = 10, samples: int = 64
    ) -> tuple[int, NDArray[np.int32]]:
        """Return what followed the longest suffix of `context`, of `longest` down to `shortest` tokens, that occurs.

        The result is the length of that suffix, 0 if there is none, and [occurrences, depth] int32, sorted, with -1
        after a text's end: at most `samples` of each shard, spread evenly.
        """
        from retrieval_index.suffix_array import longest_match, read

        pattern = np.asarray(context[-longest:], np.int64)
        matches = [longest_match(tokens, suffixes, pattern, shortest) for tokens, suffixes in self.shards]
        length = max((match[0] for match in matches), default=0)
        if length == 0:
            return 0, np.empty((0, depth), np.int32)
        rows = [
            read(tokens, suffixes, first, last, length, depth, samples, self.separator)
            for (tokens, suffixes), (found, first, last) in zip(self.shards, matches, strict=True)
            if found == length
        ]
        if len(rows) == 1:
            return length, rows[0]
        every = np.concatenate(rows)
        return length, every[np.lexsort(every.T[::-1])]

    def _map(self, shard: Shard, kind: str, dtype: Any) -> NDArray[Any]:
        path = self.folder / f"{shard.name}.{kind}"
        size = shard.tokens * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise DatastoreError(f"{path}: missing or truncated (expected {size} bytes): build the datastore again")
        return np.asarray(np.memmap(path, dtype, mode="r"))


def library(name: str) -> Any:
    """Return a module of the extra `index`. Raises DatastoreError, one line that says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the library is there, and one that it needs is missing
            raise
        raise DatastoreError(f"{name} is missing: pip install 'talon-decoding[index]'") from None
