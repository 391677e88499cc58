"""Building a dense index: cut the corpus into passages, embed them, train and store the vectors.

A build that was killed starts afresh: reading is what takes time, and the weights of words are those of all passages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from retrieval_index.build import building_in, write_whole
from retrieval_index.corpus import tokenised
from retrieval_index.datastore import HEADER, DatastoreError, checksum, fingerprint
from retrieval_index.dense import FILES, MAGIC, VERSION, DenseHeader
from retrieval_index.embedding import Floats, TextEmbedding

PASSAGE_TOKENS = 160
LARGE = 50_000  # passages; up to here all are compared (3 ms), beyond only those of the nearest cells, by their codes
_BATCH = 4096  # passages embedded at a time


def build_dense(
    tokenizer: Any,
    embedding: Floats,
    inputs: Sequence[Path],
    out: Path,
    passage_tokens: int = PASSAGE_TOKENS,
    report: Callable[[int], None] = lambda tokens: None,
    large: int = LARGE,
) -> DenseHeader:
    """Build the dense index `out` from text and JSON-lines files. embedding: [vocabulary, hidden], the target's.

    report: called with tokens read.
    """
    if len(embedding) < len(tokenizer):
        raise DatastoreError(
            f"tokenizer: {len(tokenizer)} tokens, but the target embeds {len(embedding)}: name its own directory"
        )
    with building_in(out):
        if (out / HEADER).exists() or (out / "progress.json").exists():
            raise DatastoreError(f"{out}: holds another index: name an empty folder")
        passages = list(_passages(tokenizer, inputs, passage_tokens, report))
        if not passages:
            raise DatastoreError(f"input={', '.join(map(str, inputs))}: holds no text")
        return _write(tokenizer, embedding, passages, out, large)


def _write(tokenizer: Any, embedding: Floats, passages: list[NDArray[Any]], out: Path, large: int) -> DenseHeader:
    width = 2 if len(tokenizer) < 0xFFFF else 4
    embed = TextEmbedding.fit(tokenizer, embedding, passages)
    starts = np.cumsum([0, *map(len, passages)], dtype=np.int64)
    vectors = np.concatenate([embed(passages[i : i + _BATCH]) for i in range(0, len(passages), _BATCH)])
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
    return header


def _passages(
    tokenizer: Any, inputs: Sequence[Path], longest: int, report: Callable[[int], None]
) -> Iterator[NDArray[np.uint32]]:
    """Each document whole, or in equal pieces of at most `longest` tokens."""
    for document in tokenised(tokenizer, inputs, 0, 0):
        text = document[:-1]  # the separator
        report(len(text))
        if len(text):
            yield from np.array_split(text, -(-len(text) // longest))


def _serialised(vectors: Floats, large: int) -> NDArray[np.uint8]:
    """The faiss index over unit vectors: exact, or beyond `large` in cells, compressed."""
    import faiss

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
