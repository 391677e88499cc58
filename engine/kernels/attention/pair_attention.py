"""Exact bfloat16 attention in AVX512-BF16 vectors, for processors without AMX tiles: see `paired_attention`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES
from engine.kernels.attention.attention_work import ATTENTION, equal_part
from engine.kernels.attention.paired_attention import (
    PANEL_BYTES,
    WEIGHT_BYTES,
    attending,
    fetch_block,
    gather,
    next_block,
    own_blocks,
)
from engine.kernels.gemm.matmul_sums import SUMS, add_dot, add_pairs, row_counts, row_starts, sums_in_registers
from engine.kernels.quant.layouts import BFLOAT16_LAYOUT
from engine.kernels.quant.unpack import pair_vectors
from engine.kernels.simd import FLOAT32, LANES, call_apart, pointer, splat, store
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel

_SCORED = 14  # queries whose scores with two blocks of keys are kept in registers
MOST_PAIRED = 2 * _SCORED  # queries of a tile
_WEIGHED, _PANELS = 6, 4  # queries, and panels of 16 dimensions, whose sums are kept in registers
_KEPT_BYTES = 1 << 14  # of values that stay in the first level of cache for all queries of a tile
_UNROLLED = 8  # pairs of dimensions
_INT, _WORD = ir.IntType(32), ir.IntType(64)


@subroutine
def _score_all(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
    stride, step, steps, first = work.dims * 2, work.step * 4, work.dims // (2 * _UNROLLED), 0
    while first < tile.vectors:
        some, queries = equal_part(tile.vectors - first, _SCORED), tile.queries + first * stride
        for block in range(begin, stop, 2):
            other = min(block + 1, stop - 1)  # of an odd number the last block is scored twice
            at = next_block(work, work.keys, tile, block, stop)
            apart = next_block(work, work.keys, tile, other, stop) - at
            place, between = scores + first * step + 4 * LANES * block, 4 * LANES * (other - block)
            _put_scores(some, queries, stride, at, apart, steps, place, step, between)
        first += some


@subroutine
def _weigh_all(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    block_bytes = work.dims * WEIGHT_BYTES
    kept = max(1, _KEPT_BYTES // block_bytes)
    values, apart = work.values + tile.head * block_bytes, work.kv_heads * block_bytes
    for block in range(begin, stop, kept):
        end = min(block + kept, stop)
        for later in range(end, min(end + kept, stop)):
            fetch_block(work, work.values, tile, later)
        _add_blocks(work, tile, 0, tile.vectors, block, end, values, apart, weights)


@subroutine
def _weigh_own(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    zeros, values = tile.own, tile.own + 2 * WEIGHT_BYTES
    store(splat(np.float32(0)), zeros, FLOAT32)
    for row in range(tile.first, tile.end):
        low, high = own_blocks(work, row, begin, stop)
        for block in range(low, high):
            gather(work, tile, row, block * LANES, 0, work.dims // LANES, values, zeros)
            first = (row - tile.first) * work.q_per_kv
            add_block(work, tile, first, work.q_per_kv, block, values, weights)


@subroutine
def add_block(work: Any, tile: Any, first: int, count: int, block: int, values: int, weights: int) -> None:
    """Add the weighted values of one block, which lie at `values`, to the sums of `count` queries from `first` on."""
    _add_blocks(work, tile, first, count, block, block + 1, values, 0, weights)


@subroutine
def _add_blocks(
    work: Any, tile: Any, first: int, count: int, begin: int, stop: int, values: int, apart: int, weights: int
) -> None:
    """Add the weighted values of the blocks from begin to stop to the sums of `count` queries from `first` on. values,
    apart: the address of block 0 of the pool, and how many bytes further the next one is.
    """
    step, stride, panels, end = work.step * 2, work.dims * 4, work.dims // LANES, first + count
    while first < end:
        some, of = equal_part(end - first, _WEIGHED), weights + first * step
        for panel in range(0, panels, _PANELS):
            at, place = values + panel * PANEL_BYTES, tile.sums + first * stride + panel * 4 * LANES
            if panels - panel < _PANELS:  # dimensions are a multiple of 32
                _add_values(2, some, of, step, begin, stop, tile.table, at, apart, place, stride)
            else:
                _add_values(_PANELS, some, of, step, begin, stop, tile.table, at, apart, place, stride)
        first += some


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
    step: Any,
    between: Any,
) -> Any:
    """Write the products of `rows` queries, at most `_SCORED`, with two blocks of keys.

    queries: address of the first, one every `stride` bytes, of `steps` * 16 dimensions. keys: address of the first
    block; the second is `apart` bytes further. scores: address of the first query's 16 float32 with the first block;
    those of the next query are `step` bytes further, and those with the second block `between`.
    """

    def emit(builder: Any, *args: Any) -> None:
        rows, queries, stride, keys, apart, steps, scores, step, between = args
        for count in row_counts(builder, rows, _SCORED):
            with (
                sums_in_registers(builder, count, 2, queries, stride, scores, step, between) as (starts, sums),
                cgutils.for_range(builder, steps) as loop,
            ):
                here = [builder.add(start, builder.mul(loop.index, _WORD(4 * _UNROLLED))) for start in starts]
                first = builder.add(keys, builder.mul(loop.index, _WORD(LINE_BYTES * _UNROLLED)))
                add_pairs(builder, sums, here, [first, builder.add(first, apart)], _UNROLLED)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_apart(builder, "pair_scores", args, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic(prefer_literal=True)
def _add_values(
    context: Any,
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
    """Add the weighted values of the blocks from begin to stop to the sums of `rows` rows, at most `_WEIGHED`, of
    16 dimensions for each of the panels.

    panels: a compile-time constant. weights: address of the first row's of block 0, one row every `step` bytes;
    table: of the int32 numbers of the request's blocks in the pool; values: of the panels of block 0 there, one block
    every `apart` bytes; sums: of the first row's sums, one every `stride` bytes.
    """
    width = panels.literal_value

    def emit(builder: Any, *args: Any) -> None:
        rows, weights, step, begin, stop, table, values, apart, sums, stride = args
        for count in row_counts(builder, rows, _WEIGHED):
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
                        add_dot(builder, row, matrix, start, pair)
            for place, cell in zip(itertools.chain(*places), itertools.chain(*cells), strict=True):
                builder.store(builder.load(cell), place, align=4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_apart(builder, f"pair_values_{width}", args[1:], emit)
        return context.get_dummy_value()

    return types.void(panels, *[types.int64] * 10), generate


_attend_all = attending(_score_all, _weigh_all, _weigh_own)


@kernel(ATTENTION)
def pair_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
