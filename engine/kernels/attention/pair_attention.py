"""Exact bfloat16 attention in AVX512-BF16 vectors, for processors without AMX tiles: see `paired_attention`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from engine.kernels.attention.attention_work import ATTENTION
from engine.kernels.attention.paired_attention import (
    PANEL_BYTES,
    WEIGHT_BYTES,
    attending,
    gather,
    next_block,
    own_blocks,
)
from engine.kernels.gemm.matmul_sums import SUMS, dot, row_counts, row_starts, sum_vectors
from engine.kernels.quant.layouts import BFLOAT16_LAYOUT
from engine.kernels.quant.unpack import pair_vectors
from engine.kernels.simd import FLOAT32, LANES, pointer, splat, store
from engine.kernels.threads import kernel

_SCORED = 16  # queries whose scores are kept in registers
WEIGHED, _PANELS = 6, 4  # queries, and panels of 16 dimensions, whose sums are kept in registers
_WORD = ir.IntType(64)


@njit
def _score_all(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
    stride, step, steps = work.dims * 2, work.step * 4, work.dims // 32
    for first in range(0, tile.vectors, _SCORED):
        some, q = min(_SCORED, tile.vectors - first), tile.queries + first * stride
        for block in range(begin, stop):
            at = next_block(work, work.keys, tile, block, stop)
            place = scores + first * step + 4 * LANES * block
            sum_vectors(1, _SCORED, 1, some, q, stride, at, 0, steps, place, step)


@njit
def _weigh_all(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    for first in range(0, tile.vectors, WEIGHED):
        some = min(WEIGHED, tile.vectors - first)
        for block in range(begin, stop):
            at = next_block(work, work.values, tile, block, stop)
            add_block(work, first, some, block, at, weights, tile.sums)


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
                add_block(work, first, some, block, values, weights, tile.sums)


@njit
def add_block(work: Any, begin: int, some: int, block: int, values: int, weights: int, sums: int) -> None:
    """Add a block's weighted values to the sums of `some` queries from `begin` on."""
    step, stride = work.step * 2, work.dims * 4
    of, panels = weights + begin * step + block * WEIGHT_BYTES, work.dims // LANES
    for panel in range(0, panels, _PANELS):
        at, place = values + panel * PANEL_BYTES, sums + begin * stride + panel * 4 * LANES
        if panels - panel < _PANELS:  # dimensions are a multiple of 32
            _add_values(WEIGHED, 2, some, of, step, at, place, stride)
        else:
            _add_values(WEIGHED, _PANELS, some, of, step, at, place, stride)


@intrinsic(prefer_literal=True)
def _add_values(
    context: Any,
    most: Any,
    panels: Any,
    rows: Any,
    weights: Any,
    step: Any,
    values: Any,
    sums: Any,
    stride: Any,
) -> Any:
    """Add 16 weighted values to the sums of `rows` rows, at most `most`, of 16 dimensions for each of the panels.

    most, panels: compile-time constants. weights: address of the first row's weights, one every `step` bytes; sums: of
    its sums, one every `stride` bytes.
    """
    width = panels.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, weights, step, values, sums, stride = args[2:]
        for count in row_counts(builder, rows, most.literal_value):
            starts = row_starts(builder, count, weights, step)
            places = [
                [pointer(builder, builder.add(start, _WORD(4 * LANES * panel)), SUMS) for panel in range(width)]
                for start in row_starts(builder, count, sums, stride)
            ]
            totals = [[builder.load(place, align=4) for place in row] for row in places]
            matrices = [
                pair_vectors(builder, BFLOAT16_LAYOUT, builder.add(values, _WORD(PANEL_BYTES * i)), _WORD(0), None)
                for i in range(width)
            ]
            for pair in range(LANES // 2):
                matrix = [next(one) for one in matrices]
                for row, start in enumerate(starts):
                    totals[row] = dot(builder, totals[row], matrix, start, pair)
            for place, one in zip(itertools.chain(*places), itertools.chain(*totals), strict=True):
                builder.store(one, place, align=4)
        return context.get_dummy_value()

    return types.void(most, panels, *[types.int64] * 6), generate


_attend_all = attending(_score_all, _weigh_all, _weigh_own)


@kernel(ATTENTION)
def pair_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
