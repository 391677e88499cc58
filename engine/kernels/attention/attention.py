"""Exact attention: a row's result depends on the keys that it sees, in the order of positions, and on nothing else.

It does not depend on other rows, the slots of its keys, padding, or threads. So a token's logits are the same bits
whether it was decoded alone, verified in a tree with rejected siblings, or read with its prompt, in any batch.

Keys and values lie in blocks of 16 positions (`engine.model.kv_pool`). `lane_attention` reads them on any processor;
for bfloat16, `tile_attention` does so with AMX and `pair_attention` with AVX512-BF16. `code_attention` reads those
rounded to 8 bits, and `code_pair_attention` does so with AVX512-BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Batch, BatchAddresses, Int
from engine.core.kv_shape import KVShape
from engine.kernels.amx import TILE_ROWS
from engine.kernels.attention.attention_work import ATTENTION
from engine.kernels.attention.code_attention import code_kernel, scratch_of_query
from engine.kernels.attention.code_pair_attention import code_pair_kernel
from engine.kernels.attention.lane_attention import MOST_VECTORS, VECTORS, lane_kernel
from engine.kernels.attention.pair_attention import MOST_PAIRED, pair_kernel
from engine.kernels.attention.paired_attention import STATE_BYTES, scratch_of_own
from engine.kernels.attention.tile_attention import TILES, tile_kernel
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.simd import LANES
from engine.kernels.threads import Kernel, address_of, int_fields

MOST_QUERIES = 96
"""Queries of a tile of AMX, at most: all of them use a block of keys or values while it is in the cache."""
_CHUNK = 32  # blocks that a long text is read in, which fit into the second level of cache with their scores
_WHOLE_BYTES = 1 << 19  # scores of a tile that are kept whole


def has_pairs(dtype: torch.dtype) -> bool:
    """Return whether keys and values of this type are kept in pairs, for instructions that multiply bfloat16."""
    return dtype == torch.bfloat16 and any(unit.paired for unit in units())


def _in_tiles(shape: KVShape) -> bool:
    """Return whether AMX reads a pool of that shape. Its kernel cannot even be compiled for a processor without it."""
    return shape.vnni and not shape.q8_0 and units()[0] is Unit.AMX


def _tile_size(shape: KVShape) -> tuple[int, int, int]:
    """Return how many queries a tile has, what they may become where that leaves enough tiles for the threads, and how
    many tiles with a KV head are enough for each thread.
    """
    if _in_tiles(shape):
        return TILE_ROWS, MOST_QUERIES, 4
    if shape.q8_0:
        return TILE_ROWS, TILE_ROWS, 4
    return (TILE_ROWS, MOST_PAIRED, 2) if shape.vnni else (VECTORS, MOST_VECTORS, 4)


def _kernel(shape: KVShape) -> Kernel:
    """Return the kernel that reads a pool of that shape."""
    if shape.q8_0:
        return code_pair_kernel() if shape.vnni else code_kernel()
    if _in_tiles(shape):
        return tile_kernel()
    return pair_kernel() if shape.vnni else lane_kernel()


def attention_kernels(dtype: torch.dtype, q8_0: bool) -> list[Kernel]:
    """Return the kernels that a model of that type runs on this processor. q8_0: and then with keys and values of 8
    bits.
    """
    vnni = has_pairs(dtype)
    shapes = [KVShape(1, 1, LANES, dtype, vnni), *([KVShape(1, 1, LANES, dtype, vnni, True)] if q8_0 else [])]
    return [_kernel(shape) for shape in shapes]


@dataclass(frozen=True)
class Rule:
    """How one layer attends. window: positions a row sees, itself included, 0: all. softcap: of scores, 0: none."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class Pool(Protocol):
    """Where keys and values lie (`engine.model.kv_pool`)."""

    @property
    def shape(self) -> KVShape: ...

    def addresses(self, layer: int) -> tuple[int, int]:
        """Return the addresses of the layer's keys and values."""


class Attention:
    """Attention over a pool, one batch at a time. q_per_kv: query heads per KV head. uses: layers that attend, where
    some read the keys and values of others.
    """

    def __init__(self, pool: Pool, q_per_kv: int, uses: int = 0):
        self.pool, self.q_per_kv = pool, q_per_kv
        self._work = np.zeros(uses or pool.shape.layers, ATTENTION)  # a record for each layer
        shape, work = pool.shape, self._work
        for name, value in (("kv_heads", shape.kv_heads), ("q_per_kv", q_per_kv), ("dims", shape.dims)):
            work[name] = value
        work["head_dim"], work["width"] = shape.head_dim, shape.dtype.itemsize
        self.kernel = _kernel(shape)
        self._in_chunks, (self._queries, self._most_queries, self._units) = _in_tiles(shape), _tile_size(shape)
        self._query_bytes = shape.dims * 4 + STATE_BYTES + (scratch_of_query(shape.dims) if shape.q8_0 else 0)
        work["tile_sizes"] = TILES.ctypes.data
        self.queries = torch.zeros(0, dtype=shape.dtype if shape.vnni else torch.float32)
        self._of_batch, self._own_bytes = int_fields(work, "tables", "rows"), scratch_of_own(shape.dims)
        self._scratch = torch.zeros(0, dtype=torch.uint8)
        self._numbers, self._numbers_at, self._tile_count = np.zeros(0, np.int32), 0, 0

    def begin(self, batch: Batch) -> BatchAddresses:
        """Set the batch for the next calls. Returns the addresses of its arrays, valid until the next batch."""
        shape, rows = self.pool.shape, len(batch)
        of_tile = self._rows_of_tile(rows)
        tiles = batch.tiles(of_tile)
        self._tile_count = len(tiles) - 1
        if self.queries.numel() < (needed := rows * self.q_per_kv * shape.kv_heads * shape.dims):
            self.queries = self.queries.new_zeros(needed)
        vectors = min(of_tile, rows) * self.q_per_kv
        chunk, kept = self._blocks_kept(batch, vectors)
        step = (-(-kept // 2) | 1) * 2 * BLOCK_SIZE  # an odd number of cache lines: else rows compete for the same
        bytes_each = vectors * (step * 6 + self._query_bytes) + self._own_bytes
        bytes_each = -(-bytes_each // 64) * 64 + 64
        if self._scratch.numel() < (needed := bytes_each * torch.get_num_threads()):
            self._scratch = torch.zeros(needed, dtype=torch.uint8)
        first, tables = self._put([*batch.numbers, *tiles], batch.tables_of)
        at = BatchAddresses(*(first + 4 * start for start in batch.starts))
        seen = tables, at.table_of, at.prefix_lens, at.ancestor_ptr, at.ancestor_slots, at.tiles
        buffers = self.queries.data_ptr(), self._scratch.data_ptr(), bytes_each, step, chunk
        self._of_batch[:] = *seen, *buffers, self._tile_count, rows
        return at

    def _rows_of_tile(self, rows: int) -> int:
        """Return how many rows share their reading of keys and values, of a batch with so many."""
        least, most = (max(1, queries // self.q_per_kv) for queries in (self._queries, self._most_queries))
        enough: int = rows * self.pool.shape.kv_heads // (self._units * torch.get_num_threads())
        return min(most, max(least, enough))

    def _blocks_kept(self, batch: Batch, vectors: int) -> tuple[int, int]:
        """Return how many blocks' scores so many queries of a tile keep at a time before their tail, and with it."""
        blocks = max(map(len, batch.tables_of))
        if not self._in_chunks or vectors * blocks * BLOCK_SIZE * 4 <= _WHOLE_BYTES:
            return blocks, blocks
        kept = _CHUNK + max(map(partial(_tail_blocks, batch), batch.spans))
        return (_CHUNK, kept) if kept < blocks else (blocks, blocks)

    def _put(self, numbers: list[int], tables: Sequence[Int]) -> tuple[int, int]:
        """Store the numbers as int32, and the tables after them; returns both addresses. Asking an array for its
        address takes as long as filling it, so one array is kept.
        """
        ends = list(accumulate(map(len, tables), initial=len(numbers)))
        if len(self._numbers) < ends[-1]:
            self._numbers = np.zeros(2 * ends[-1], np.int32)
            self._numbers_at = int(self._numbers.ctypes.data)
        self._numbers[: len(numbers)] = numbers
        for start, end, table in zip(ends, ends[1:], tables, strict=False):
            self._numbers[start:end] = table
        return self._numbers_at, self._numbers_at + 4 * len(numbers)

    def attend(self, layer: int, rule: Rule, out: Tensor) -> None:
        """Attend with each row's query, in `queries`, to the layer's keys and values. out: [rows, heads * head_dim]."""
        address = self.record(layer, rule, out)
        self.kernel(address, self._tile_count * self.pool.shape.kv_heads)

    def record(self, layer: int, rule: Rule, out: Tensor, use: int | None = None) -> int:
        """Return the address of the kernel's record for this layer, which stays valid for later batches. use: the
        number of the layer that attends, if it reads the keys and values of another.
        """
        at = layer if use is None else use
        record = self._work[at]
        record["keys"], record["values"] = self.pool.addresses(layer)
        record["window"], record["scale"], record["softcap"] = rule.window, rule.scale, rule.softcap
        record["sinks"] = 0 if rule.sinks is None else rule.sinks.data_ptr()
        record["out"] = out.data_ptr()
        return address_of(self._work, at)


def _tail_blocks(batch: Batch, span: tuple[int, int]) -> int:
    """Return the blocks that a request's rows with ancestors may reach, from the first that they do not share."""
    first, end = span
    begin, stop = batch.ancestor_ptr[[first, end]].tolist()
    if begin == stop:
        return 0
    shortest, longest = batch.prefix_lens[first:end].min(), batch.prefix_lens[first:end].max()
    last = max(int(longest) - 1, int(batch.ancestor_slots[begin:stop].max()))
    return last // BLOCK_SIZE + 1 - int(shortest) // BLOCK_SIZE


class LayerKeys(NamedTuple):
    """Which keys and values a layer attends to, and how. layer: their number in the attention's pool. use: the layer's
    among those that the attention serves. own: whether the layer itself writes them.
    """

    attention: Attention
    layer: int
    rule: Rule
    use: int | None = None
    own: bool = True
