"""Exact bfloat16 attention in AVX512-BF16 vectors, for processors without AMX tiles: see `paired_attention`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, fetch
from engine.kernels.attention.attention_work import ATTENTION, equal_part
from engine.kernels.attention.paired_attention import (
    PANEL_BYTES,
    WEIGHT_BYTES,
    attending,
    gather,
    next_block,
    own_blocks,
    place_of,
)
from engine.kernels.gemm.matmul_sums import SUMS, dot, row_counts, row_starts
from engine.kernels.quant.layouts import BFLOAT16_LAYOUT
from engine.kernels.quant.unpack import pair_vectors
from engine.kernels.simd import FLOAT32, LANES, call_apart, pointer, splat, store
from engine.kernels.threads import kernel

_SCORED, _BLOCKS = 14, 2  # queries, and blocks of keys, whose scores are kept in registers
MOST_PAIRED = 2 * _SCORED  # queries of a tile
WEIGHED, _PANELS = 6, 4  # queries, and panels of 16 dimensions, whose sums are kept in registers
_KEPT_BYTES = 1 << 14  # of values that stay in the first level of cache for all queries of a tile
_UNROLLED = 8  # pairs of dimensions
_INT, _WORD = ir.IntType(32), ir.IntType(64)
_PAIRS = ir.VectorType(_INT, LANES)


@njit
def _score_all(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
    stride, step, steps, first = work.dims * 2, work.step * 4, work.dims // (2 * _UNROLLED), 0
    while first < tile.vectors:
        some, queries = equal_part(tile.vectors - first, _SCORED), tile.queries + first * stride
        for block in range(begin, stop, _BLOCKS):
            other = min(block + 1, stop - 1)  # of an odd number the last block is scored twice
            at = next_block(work, work.keys, tile, block, stop)
            apart, place = next_block(work, work.keys, tile, other, stop) - at, scores + first * step
            near, far = place + 4 * LANES * block, place + 4 * LANES * other
            _put_scores(some, queries, stride, at, apart, steps, near, far, step)
        first += some


@njit
def _weigh_all(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    block_bytes = work.dims * WEIGHT_BYTES
    kept = max(1, _KEPT_BYTES // block_bytes)
    values = work.values + tile.head * block_bytes
    for block in range(begin, stop, kept):
        end = min(block + kept, stop)
        for later in range(end, min(end + kept, stop)):
            ahead = place_of(work, work.values, tile, later)
            for line in range(0, block_bytes, LINE_BYTES):
                fetch(ahead + line)
        first = 0
        while first < tile.vectors:
            some = equal_part(tile.vectors - first, WEIGHED)
            _add_blocks(work, first, some, block, end, tile.table, values, work.kv_heads * block_bytes, weights, tile)
            first += some


@njit
def _weigh_own(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    zeros, values = tile.own, tile.own + 2 * WEIGHT_BYTES
    store(splat(np.float32(0)), zeros, FLOAT32)
    for row in range(tile.first, tile.end):
        low, high = own_blocks(work, row, begin, stop)
        for block in range(low, high):
            gather(work, tile, row, block * LANES, 0, work.dims // LANES, values, zeros)
            for group in range(0, work.q_per_kv, WEIGHED):
                some, first = min(WEIGHED, work.q_per_kv - group), (row - tile.first) * work.q_per_kv + group
                add_block(work, tile, first, some, block, values, weights)


@njit
def add_block(work: Any, tile: Any, first: int, some: int, block: int, values: int, weights: int) -> None:
    """Add the weighted values of one block, which lie at `values`, to the sums of `some` queries from `first` on."""
    _add_blocks(work, first, some, block, block + 1, tile.table, values, 0, weights, tile)


@njit
def _add_blocks(
    work: Any,
    first: int,
    some: int,
    begin: int,
    stop: int,
    table: int,
    values: int,
    apart: int,
    weights: int,
    tile: Any,
) -> None:
    """Add the weighted values of the blocks from begin to stop to the sums of `some` queries from `first` on. values,
    apart: the address of block 0 of the pool, and how many bytes further the next one is.
    """
    step, stride, panels = work.step * 2, work.dims * 4, work.dims // LANES
    of = weights + first * step
    for panel in range(0, panels, _PANELS):
        at, place = values + panel * PANEL_BYTES, tile.sums + first * stride + panel * 4 * LANES
        if panels - panel < _PANELS:  # dimensions are a multiple of 32
            _add_values(WEIGHED, 2, some, of, step, begin, stop, table, at, apart, place, stride)
        else:
            _add_values(WEIGHED, _PANELS, some, of, step, begin, stop, table, at, apart, place, stride)


@intrinsic
def _put_scores(
    context: Any,
    rows: Any,
    queries: Any,
    stride: Any,
    keys: Any,
    apart: Any,
    steps: Any,
    scores: Any,
    others: Any,
    step: Any,
) -> Any:
    """Write the products of `rows` queries, at most `_SCORED`, with two blocks of keys.

    queries: address of the first, one every `stride` bytes, of `steps` * 16 dimensions. keys: address of the first
    block; the second is `apart` bytes further. scores, others: addresses of the first query's 16 float32 with the first
    block and with the second; those of the next query are `step` bytes further.
    """

    def emit(builder: Any, *args: Any) -> None:
        rows, queries, stride, keys, apart, steps, *places, step = args
        for count in row_counts(builder, rows, _SCORED):
            cells = [[cgutils.alloca_once(builder, SUMS) for _ in places] for _ in range(count)]
            for cell in itertools.chain(*cells):
                builder.store(ir.Constant(SUMS, [0.0] * LANES), cell)
            starts = row_starts(builder, count, queries, stride)
            with cgutils.for_range(builder, steps) as loop:
                here = [builder.add(start, builder.mul(loop.index, _WORD(4 * _UNROLLED))) for start in starts]
                first = builder.add(keys, builder.mul(loop.index, _WORD(LINE_BYTES * _UNROLLED)))
                blocks = [first, builder.add(first, apart)]
                for pair in range(_UNROLLED):
                    at = [builder.add(block, _WORD(LINE_BYTES * pair)) for block in blocks]
                    matrix = [builder.load(pointer(builder, line, _PAIRS), align=4) for line in at]
                    for row, start in zip(cells, here, strict=True):
                        _add_dot(builder, row, matrix, start, pair)
            for place, column in zip(places, zip(*cells, strict=True), strict=True):
                for goal, cell in zip(row_starts(builder, count, place, step), column, strict=True):
                    builder.store(builder.load(cell), pointer(builder, goal, SUMS), align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_apart(builder, "pair_scores", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _add_dot(builder: ir.IRBuilder, cells: list[ir.Value], matrix: list[ir.Value], row: ir.Value, pair: int) -> None:
    """Add a row's `dot` to the sums in these cells."""
    for cell, total in zip(cells, dot(builder, [*map(builder.load, cells)], matrix, row, pair), strict=True):
        builder.store(total, cell)


@intrinsic(prefer_literal=True)
def _add_values(
    context: Any,
    most: Any,
    panels: Any,
    rows: Any,
    weights: Any,
    step: Any,
    begin: Any,
    stop: Any,
    table: Any,
    values: Any,
    apart: Any,
    sums: Any,
    stride: Any,
) -> Any:
    """Add the weighted values of the blocks from begin to stop to the sums of `rows` rows, at most `most`, of 16
    dimensions for each of the panels.

    most, panels: compile-time constants. weights: address of the first row's of block 0, one row every `step` bytes;
    table: of the int32 numbers of the request's blocks in the pool; values: of the panels of block 0 there, one block
    every `apart` bytes; sums: of the first row's sums, one every `stride` bytes.
    """
    width = panels.literal_value

    def emit(builder: Any, *args: Any) -> None:
        rows, weights, step, begin, stop, table, values, apart, sums, stride = args
        for count in row_counts(builder, rows, most.literal_value):
            places = [
                [pointer(builder, builder.add(start, _WORD(4 * LANES * panel)), SUMS) for panel in range(width)]
                for start in row_starts(builder, count, sums, stride)
            ]
            cells = [[cgutils.alloca_once(builder, SUMS) for _ in range(width)] for _ in range(count)]
            for place, cell in zip(itertools.chain(*places), itertools.chain(*cells), strict=True):
                builder.store(builder.load(place, align=4), cell)
            with cgutils.for_range_slice(builder, begin, stop, _WORD(1)) as (block, _):
                entry = builder.load(pointer(builder, builder.add(table, builder.mul(block, _WORD(4))), _INT))
                here = builder.add(values, builder.mul(builder.sext(entry, _WORD), apart))
                of_block = builder.add(weights, builder.mul(block, _WORD(WEIGHT_BYTES)))
                starts = row_starts(builder, count, of_block, step)
                matrices = [
                    pair_vectors(builder, BFLOAT16_LAYOUT, builder.add(here, _WORD(PANEL_BYTES * i)), _WORD(0), None)
                    for i in range(width)
                ]
                for pair in range(LANES // 2):
                    matrix = [next(one) for one in matrices]
                    for row, start in zip(cells, starts, strict=True):
                        _add_dot(builder, row, matrix, start, pair)
            for place, cell in zip(itertools.chain(*places), itertools.chain(*cells), strict=True):
                builder.store(builder.load(cell), place, align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_apart(builder, f"pair_values_{most.literal_value}_{width}", args[2:], emit)
        return context.get_dummy_value()

    return types.void(most, panels, *[types.int64] * 10), generate


_attend_all = attending(_score_all, _weigh_all, _weigh_own)


@kernel(ATTENTION)
def pair_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
