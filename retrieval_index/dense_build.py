"""Building a dense index: cut the corpus into passages, embed them, train and store the vectors.

Reading and embedding go part by part, and each part is its own file until the index is complete, so a killed build
resumes after the last one. The words are weighted between the two, and the vectors are trained after them.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.files.whole_file import whole_file, write_whole
from retrieval_index.build import PROGRESS, Begun, building_in, described, resume
from retrieval_index.corpus import tokenised
from retrieval_index.datastore import HEADER, DatastoreError, checksum, fingerprint, library
from retrieval_index.dense import FILES, MAGIC, VERSION, DenseHeader, read_header
from retrieval_index.embedding import Floats, TextEmbedding

PASSAGE_TOKENS = 160
PART_TOKENS = 1_000_000  # tokens that are read and embedded at a time
LARGE = 50_000  # passages; up to here all are compared (3 ms); beyond, only those of the nearest cells, by their codes

Passages = list[NDArray[np.uint32]]


class DenseProgress(Begun):
    """How far a dense index is built. parts: how many documents each part on the disk holds. read: whether these are
    all documents.
    """

    parts: list[int] = msgspec.field(default_factory=list)
    read: bool = False


def build_dense(
    tokenizer: Any,
    embedding: Floats,
    inputs: Sequence[Path],
    out: Path,
    passage_tokens: int = PASSAGE_TOKENS,
    report: Callable[[int], None] = lambda tokens: None,
    large: int = LARGE,
    part_tokens: int = PART_TOKENS,
) -> DenseHeader:
    """Build, or resume, the dense index `out` from text and JSON-lines files. embedding: [vocabulary, hidden],
    the target's. report: called with tokens read."""
    library("faiss")  # where it is missing, that is told before the files are read
    if len(embedding) < len(tokenizer):
        raise DatastoreError(
            f"tokenizer: {len(tokenizer)} tokens, but the target embeds {len(embedding)}: name its own directory"
        )
    with building_in(out):
        settings = (
            f"dense {zlib.crc32(np.ascontiguousarray(embedding).data):08x} {passage_tokens} {large} {part_tokens}"
        )
        progress = resume(out / PROGRESS, DenseProgress([*described(inputs), fingerprint(tokenizer), settings]))
        if not (out / HEADER).exists():
            parts = [_stored_part(_part(out, number, "passages")) for number in range(len(progress.parts))]
            if not progress.read:
                parts += _read(tokenizer, inputs, out, progress, passage_tokens, part_tokens, report)
            if not parts:
                raise DatastoreError(f"input={', '.join(map(str, inputs))}: holds no text")
            _write(tokenizer, embedding, parts, out, large)
        for path in (*out.glob("*.passages"), *out.glob("*.directions"), out / PROGRESS):
            path.unlink()
        return read_header(out)


def _read(
    tokenizer: Any,
    inputs: Sequence[Path],
    out: Path,
    progress: DenseProgress,
    longest: int,
    part_tokens: int,
    report: Callable[[int], None],
) -> Iterator[Passages]:
    """Yield the parts that no earlier run has read, each written to disk before the next begins."""
    part: Passages = []
    held = documents = 0

    def keep() -> Passages:
        with whole_file(_part(out, len(progress.parts), "passages")) as file:
            np.savez(file, tokens=np.concatenate(part), lengths=[len(passage) for passage in part])
        progress.parts.append(documents)
        write_whole(out / PROGRESS, msgspec.json.encode(progress))
        return part

    for document in tokenised(tokenizer, inputs, sum(progress.parts), 0):
        text = document[:-1]  # without the separator
        report(len(text))
        part += _passages(text, longest)
        held, documents = held + len(text), documents + 1
        if held >= part_tokens:
            yield keep()
            part, held, documents = [], 0, 0
    if part:
        yield keep()
    if progress.parts:
        progress.read = True
        write_whole(out / PROGRESS, msgspec.json.encode(progress))


def _passages(text: NDArray[np.uint32], longest: int) -> Passages:
    """Return a document whole, or in equal pieces of at most `longest` tokens."""
    return np.array_split(text, -(-len(text) // longest)) if len(text) else []


def _part(out: Path, number: int, kind: str) -> Path:
    return out / f"{number:04d}.{kind}"


def _stored_part(path: Path) -> Passages:
    try:
        with np.load(path) as file:
            return np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile):
        raise _damaged(path) from None


def _stored_rows(path: Path, dtype: Any, rows: int) -> NDArray[Any]:
    values = np.fromfile(path, dtype)
    if not len(values) or len(values) % rows:
        raise _damaged(path)
    return values.reshape(rows, -1)


def _damaged(path: Path) -> DatastoreError:
    return DatastoreError(f"{path}: damaged: delete the folder and build again")


def _write(tokenizer: Any, embedding: Floats, parts: list[Passages], out: Path, large: int) -> None:
    width = 2 if len(tokenizer) < 0xFFFF else 4
    passages = [passage for part in parts for passage in part]
    embed = _fitted(tokenizer, embedding, passages, out)
    files = [_part(out, number, "directions") for number in range(len(parts))]
    embed.learn_common(map(partial(_directions, embed), parts, files))
    vectors = np.concatenate(
        [embed.vectors(_directions(embed, part, file)) for part, file in zip(parts, files, strict=True)]
    )
    starts = np.cumsum([0, *map(len, passages)], dtype=np.int64)
    contents: tuple[NDArray[Any], ...] = (
        np.concatenate(passages).astype(f"<u{width}"), starts, embed.tokens, embed.common,
        _serialised(vectors, large),
    )  # fmt: skip
    for name, content in zip(FILES, contents, strict=True):
        write_whole(out / name, content.tobytes())
    header = DenseHeader(
        MAGIC,
        VERSION,
        fingerprint(tokenizer),
        width,
        len(passages),
        vectors.shape[1],
        {name: (out / name).stat().st_size for name in FILES},
        {name: checksum(out / name) for name in FILES},
    )
    write_whole(out / HEADER, msgspec.json.encode(header))


def _fitted(tokenizer: Any, embedding: Floats, passages: Passages, out: Path) -> TextEmbedding:
    """Return the words' vectors: from an earlier run, or weighted now."""
    path = out / "embedding.tokens"
    if path.exists():
        tokens = _stored_rows(path, np.float16, len(tokenizer))
        return TextEmbedding(tokens, np.zeros(tokens.shape[1], np.float32))
    embed = TextEmbedding.fit(tokenizer, embedding, passages)
    write_whole(path, embed.tokens.tobytes())
    return embed


def _directions(embed: TextEmbedding, part: Passages, path: Path) -> Floats:
    """Return a part's directions: from an earlier run, or embedded now."""
    if not path.exists():
        write_whole(path, embed.directions(part).tobytes())
    return _stored_rows(path, np.float32, len(part))


def _serialised(vectors: Floats, large: int) -> NDArray[np.uint8]:
    """Serialise the faiss index over unit vectors: exact, or compressed in cells if there are more than `large`."""
    faiss = library("faiss")
    dimensions = vectors.shape[1]
    if len(vectors) <= large:
        index: Any = faiss.IndexFlatIP(dimensions)
    else:
        cells = min(4 * isqrt(len(vectors)), len(vectors) // 39)  # faiss wants 39 vectors a cell to train on
        codes = next(codes for codes in range(max(1, dimensions // 4), 0, -1) if dimensions % codes == 0)
        bits = min(8, (len(vectors) // 39).bit_length() - 1)
        coarse = faiss.IndexFlatIP(dimensions)
        index = faiss.IndexIVFPQ(coarse, dimensions, max(1, cells), codes, bits, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
    index.add(vectors)
    serialised: NDArray[np.uint8] = faiss.serialize_index(index)
    return serialised
