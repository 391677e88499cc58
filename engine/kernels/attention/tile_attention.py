"""Exact bfloat16 attention in AMX tiles, for processors that have them: see `paired_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from engine.kernels.amx import (
    TILE_ROWS,
    configure_tiles,
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
    place_of,
)
from engine.kernels.simd import FLOAT32, LANES, pointer, splat, store
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel

_PANELS = 4  # panels of 16 dimensions, whose sums are kept in tiles at once
_QUERIES = 4  # tiles of queries whose scores are computed at once
_KEYS = 1024  # bytes of 32 dimensions of a block's keys

_SCORING = tile_sizes([*[(None, 64)] * 6, (TILE_ROWS, 64)])
"""Tiles 0 to 3 hold scores, 4 and 5 queries of 32 dimensions, 6 keys."""
_WEIGHING = tile_sizes([*[(None, 64)] * 4, *[(None, WEIGHT_BYTES)] * 2, *[(LANES // 2, 64)] * 2])
"""Tiles 0 to 3 hold sums, 4 and 5 weights of 16 positions, 6 and 7 values."""
TILES = np.stack([_SCORING, _WEIGHING])
TILES_BYTES = _SCORING.nbytes


@subroutine
def _score_all(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
    whole, rest = tile.vectors // TILE_ROWS, tile.vectors % TILE_ROWS
    configure_tiles(work.tile_sizes + TILE_ROWS * 64)
    for block in range(begin, stop if whole else begin):
        at = next_block(work, work.keys, tile, block, stop)
        for i in range(0, whole, _QUERIES):
            _score(work, tile, i * TILE_ROWS, min(_QUERIES, whole - i), at, scores + 4 * LANES * block)
    if rest:
        configure_tiles(work.tile_sizes + rest * 64)
        for block in range(begin, stop):
            at = next_block(work, work.keys, tile, block, stop)
            _score(work, tile, whole * TILE_ROWS, 1, at, scores + 4 * LANES * block)


@subroutine
def _score(work: Any, tile: Any, first: int, tiles: int, keys: int, scores: int) -> None:
    """Compute the products of up to four tiles of queries, from the query `first` on, with one block of keys."""
    stride = work.dims * 2
    queries, apart = tile.queries + first * stride, TILE_ROWS * stride
    _begin_sums()
    for step in range(work.dims // 32):
        at = queries + 64 * step
        tile_load(6, keys + _KEYS * step, 64)
        tile_load(4, at, stride)
        tile_dot(0, 4, 6)
        if tiles > 1:
            tile_load(5, at + apart, stride)
            tile_dot(1, 5, 6)
        if tiles > 2:
            tile_load(4, at + 2 * apart, stride)
            tile_dot(2, 4, 6)
        if tiles > 3:
            tile_load(5, at + 3 * apart, stride)
            tile_dot(3, 5, 6)
    step = work.step * 4
    _put_sums(scores + first * step, step, TILE_ROWS * step, tiles)


@subroutine
def _weigh_all(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    sizes, rest = work.tile_sizes + TILES_BYTES, tile.vectors % TILE_ROWS
    whole = tile.vectors - rest
    for panel in range(0, work.dims // LANES, _PANELS):
        configure_tiles(sizes + TILE_ROWS * 64)
        for first in range(0, whole, TILE_ROWS):
            _weigh(work, tile, first, panel, begin, stop, weights)
        if rest:
            configure_tiles(sizes + rest * 64)
            _weigh(work, tile, whole, panel, begin, stop, weights)


@subroutine
def _weigh(work: Any, tile: Any, first: int, panel: int, begin: int, stop: int, weights: int) -> None:
    """Add values times weights to the sums of a tile of queries from `first` on, for some panels of dimensions from
    `panel` on.
    """
    panels, stride, step = min(_PANELS, work.dims // LANES - panel), work.dims * 4, work.step * 2
    sums = tile.sums + first * stride + panel * 4 * LANES
    _load_sums(sums, stride, panels)
    for block in range(begin, stop):
        at = place_of(work, work.values, tile, block) if first else next_block(work, work.values, tile, block, stop)
        tile_load(4, weights + first * step + block * WEIGHT_BYTES, step)
        _add(at + panel * PANEL_BYTES, panels)
    _put_sums(sums, stride, 4 * LANES, panels)


@subroutine
def _weigh_own(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    sizes = work.tile_sizes + TILES_BYTES
    for first in range(0, tile.vectors if begin < stop else 0, TILE_ROWS):
        size = min(TILE_ROWS, tile.vectors - first)
        configure_tiles(sizes + size * 64)
        for panel in range(0, work.dims // LANES, _PANELS):
            _weigh_rows(work, tile, first, size, panel, begin, stop, weights)


@subroutine
def _weigh_rows(work: Any, tile: Any, first: int, size: int, panel: int, begin: int, stop: int, weights: int) -> None:
    """Add values times weights to the sums of `size` queries from `first` on, for some panels of dimensions from
    `panel` on: each row's own, with weights of zero for the other queries.
    """
    panels, stride, step = min(_PANELS, work.dims // LANES - panel), work.dims * 4, work.step * 2
    zeros, alone = tile.own, tile.own + 2 * WEIGHT_BYTES
    values = alone + TILE_ROWS * WEIGHT_BYTES
    for i in range(0, (2 + TILE_ROWS) * WEIGHT_BYTES, 4 * LANES):
        store(splat(np.float32(0)), zeros + i, FLOAT32)
    sums = tile.sums + first * stride + panel * 4 * LANES
    _load_sums(sums, stride, panels)
    for row in range(tile.first + first // work.q_per_kv, tile.end):
        left = max((row - tile.first) * work.q_per_kv, first)
        right = min((row - tile.first + 1) * work.q_per_kv, first + size)
        if left >= right:
            break
        low, high = own_blocks(work, row, begin, stop)
        for block in range(low, high):
            for query in range(left, right):
                _copy_row(weights + query * step + block * WEIGHT_BYTES, alone + (query - first) * WEIGHT_BYTES)
            gather(work, tile, row, block * LANES, panel, panels, values, zeros)
            tile_load(4, alone, WEIGHT_BYTES)
            _add(values, panels)
        for query in range(left, right):
            _copy_row(zeros, alone + (query - first) * WEIGHT_BYTES)
    _put_sums(sums, stride, 4 * LANES, panels)


_attend_all = attending(_score_all, _weigh_all, _weigh_own)


@kernel(ATTENTION)
def tile_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
    release_tiles()


@subroutine
def _begin_sums() -> None:
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)


@subroutine
def _load_sums(place: int, stride: int, panels: int) -> None:
    tile_load(0, place, stride)
    if panels > 1:
        tile_load(1, place + 4 * LANES, stride)
    if panels > 2:
        tile_load(2, place + 8 * LANES, stride)
    if panels > 3:
        tile_load(3, place + 12 * LANES, stride)


@subroutine
def _add(values: int, panels: int) -> None:
    """Add the products of the weights in tile 4 with a block's values."""
    tile_load(6, values, 64)
    tile_dot(0, 4, 6)
    if panels > 1:
        tile_load(7, values + PANEL_BYTES, 64)
        tile_dot(1, 4, 7)
    if panels > 2:
        tile_load(6, values + 2 * PANEL_BYTES, 64)
        tile_dot(2, 4, 6)
    if panels > 3:
        tile_load(7, values + 3 * PANEL_BYTES, 64)
        tile_dot(3, 4, 7)


@subroutine
def _put_sums(place: int, stride: int, apart: int, tiles: int) -> None:
    """Store the first tiles, `apart` bytes from each other."""
    tile_store(0, place, stride)
    if tiles > 1:
        tile_store(1, place + apart, stride)
    if tiles > 2:
        tile_store(2, place + 2 * apart, stride)
    if tiles > 3:
        tile_store(3, place + 3 * apart, stride)


@intrinsic(prefer_literal=True)
def _copy_row(context: Any, source: Any, place: Any) -> Any:
    """Copy a row of weights."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(16), LANES)
        row = builder.load(pointer(builder, args[0], kind), align=2)
        builder.store(row, pointer(builder, args[1], kind), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
