"""Exact bfloat16 attention in AMX tiles, for processors that have them: see `paired_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from engine.kernels.amx import (
    TILE_ROWS,
    configure_tiles,
    pointer,
    release_tiles,
    tile_dot,
    tile_load,
    tile_sizes,
    tile_store,
    tile_zero,
)
from engine.kernels.attention.attention_work import ATTENTION
from engine.kernels.attention.paired_attention import (
    PANEL_BYTES,
    WEIGHT_BYTES,
    attending,
    gather,
    next_block,
    own_blocks,
)
from engine.kernels.simd import FLOAT32, LANES, splat, store
from engine.kernels.threads import kernel

PANELS = 4  # panels of 16 dimensions, whose sums are kept in tiles at once
_KEYS = 1024  # bytes of 32 dimensions of a block's keys

TILES = tile_sizes([*[(None, 64)] * 5, (TILE_ROWS, 64), (None, WEIGHT_BYTES), (LANES // 2, 64)])
"""Tiles 0 to 3 hold sums, 4 queries of 32 dimensions, 5 keys, 6 weights of 16 positions, 7 values."""


@njit
def _score_all(work: Any, queries: int, count: int, table: int, head: int, low: int, high: int, scores: int) -> None:
    size = min(count, TILE_ROWS)
    configure_tiles(work.tile_sizes + size * 64)
    for start in range(0, count, TILE_ROWS):
        begin = min(start, count - size)  # the last tile may repeat queries
        for block in range(low, high):
            at = next_block(work, work.keys, table, block, high, head)
            place = scores + begin * work.step * 4 + 4 * LANES * block
            _score(work, queries + begin * work.dims * 2, at, place)


@njit
def _weigh_all(
    work: Any,
    table: int,
    head: int,
    first: int,
    end: int,
    low: int,
    common: int,
    weights: int,
    sums: int,
    own: int,
) -> None:
    count = (end - first) * work.q_per_kv
    size = min(count, TILE_ROWS)
    configure_tiles(work.tile_sizes + size * 64)
    for start in range(0, count, TILE_ROWS):
        begin = min(start, count - size)
        for panel in range(0, work.dims // LANES, PANELS):
            _weigh(work, table, head, first, end, begin, size, panel, low, common, weights, sums, own)


_attend_all = attending(_score_all, _weigh_all)


@kernel(ATTENTION)
def tile_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
    release_tiles()


@njit
def _score(work: Any, queries: int, keys: int, place: int) -> None:
    """Compute the products of a tile's queries with one block of keys."""
    tile_zero(0)
    for step in range(work.dims // 32):
        tile_load(4, queries + 64 * step, work.dims * 2)
        tile_load(5, keys + _KEYS * step, 64)
        tile_dot(0, 4, 5)
    tile_store(0, place, work.step * 4)


@njit
def _weigh(
    work: Any,
    table: int,
    head: int,
    first: int,
    end: int,
    begin: int,
    size: int,
    panel: int,
    low: int,
    common: int,
    weights: int,
    sums: int,
    own: int,
) -> None:
    """Compute sums of values times weights for the queries from `begin` on and some panels of dimensions from `panel`
    on.
    """
    panels = min(PANELS, work.dims // LANES - panel)
    zeros, alone = own, own + 2 * WEIGHT_BYTES
    values = alone + TILE_ROWS * WEIGHT_BYTES
    for i in range(0, (2 + TILE_ROWS) * WEIGHT_BYTES, 4 * LANES):
        store(splat(np.float32(0)), own + i, FLOAT32)
    _begin_sums()
    for block in range(low, common):
        at = next_block(work, work.values, table, block, common, head)
        tile_load(6, weights + begin * work.step * 2 + block * WEIGHT_BYTES, work.step * 2)
        _add(at + panel * PANEL_BYTES, panels)
    for row in range(first, end):
        left = max((row - first) * work.q_per_kv, begin)
        right = min((row - first + 1) * work.q_per_kv, begin + size)
        if left >= right:
            continue
        begun, stop, seen = own_blocks(work, row, common)
        for block in range(begun, stop):
            for vector in range(left, right):
                _copy_row(
                    weights + vector * work.step * 2 + block * WEIGHT_BYTES, alone + (vector - begin) * WEIGHT_BYTES
                )
            gather(work, table, head, row, block * LANES, seen, panel, panels, values, zeros)
            tile_load(6, alone, WEIGHT_BYTES)
            _add(values, panels)
        for vector in range(left, right):
            _copy_row(zeros, alone + (vector - begin) * WEIGHT_BYTES)
    _end_sums(sums + begin * work.dims * 4 + panel * 4 * LANES, work.dims * 4, panels)


@njit
def _begin_sums() -> None:
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)


@njit
def _add(values: int, panels: int) -> None:
    """Add the products of the weights in tile 6 with a block's values."""
    tile_load(7, values, 64)
    tile_dot(0, 6, 7)
    if panels > 1:
        tile_load(7, values + PANEL_BYTES, 64)
        tile_dot(1, 6, 7)
    if panels > 2:
        tile_load(7, values + 2 * PANEL_BYTES, 64)
        tile_dot(2, 6, 7)
    if panels > 3:
        tile_load(7, values + 3 * PANEL_BYTES, 64)
        tile_dot(3, 6, 7)


@njit
def _end_sums(place: int, stride: int, panels: int) -> None:
    tile_store(0, place, stride)
    if panels > 1:
        tile_store(1, place + 4 * LANES, stride)
    if panels > 2:
        tile_store(2, place + 8 * LANES, stride)
    if panels > 3:
        tile_store(3, place + 12 * LANES, stride)


@intrinsic(prefer_literal=True)
def _copy_row(context: Any, source: Any, place: Any) -> Any:
    """Copy a row of weights."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(16), LANES)
        row = builder.load(pointer(builder, args[0], kind), align=2)
        builder.store(row, pointer(builder, args[1], kind), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
