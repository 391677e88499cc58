"""Exact bfloat16 attention over keys and values rounded to 8 bits, on processors that multiply bfloat16: see
`paired_attention`, and `engine.kernels.attention.kv_codes` for how codes lie.

Scores are those of `code_attention`, of queries in bfloat16. A block's values become bfloat16 in the layout of pairs
(code times scale) for all queries of a tile at once, and are weighed as `pair_attention` weighs them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from engine.kernels.attention.attention_work import ATTENTION, first_seen, seen_end
from engine.kernels.attention.code_attention import FASTEST, next_codes, numbers, scoring
from engine.kernels.attention.kv_codes import head_bytes, value_codes_at, value_scales_at
from engine.kernels.attention.pair_attention import add_block
from engine.kernels.attention.paired_attention import (
    PANEL_BYTES,
    WEIGHT_BYTES,
    attending,
    own_blocks,
    slot_at,
)
from engine.kernels.quant.layouts import STEP as GROUP
from engine.kernels.simd import BFLOAT16, LANES, float16_at, int_at, pointer, spread
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel

_WORD = ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_score = scoring(BFLOAT16, FASTEST)


@subroutine
def _score_all(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
    _score(work, tile.queries, tile.vectors, tile.table, tile.head, begin, stop, scores, tile.rest)


@subroutine
def _weigh_all(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    values = tile.own + 2 * WEIGHT_BYTES
    for block in range(begin, stop):
        at = next_codes(work, work.values, tile.table, block, stop - 1, tile.head)
        for pair in range(LANES // 2):
            _join_values(work.dims, at, 2 * pair, 1, at, 2 * pair + 1, 1, values + 64 * pair)
        add_block(work, tile, 0, tile.vectors, block, values, weights)


@subroutine
def _weigh_own(work: Any, tile: Any, begin: int, stop: int, weights: int) -> None:
    values = tile.own + 2 * WEIGHT_BYTES
    for row in range(tile.first, tile.end):
        start, seen = first_seen(work, row), seen_end(work, row)
        low, high = own_blocks(work, row, begin, stop)
        for block in range(low, high):
            for pair in range(LANES // 2):
                even = block * LANES + 2 * pair
                one, one_lane = _value_at(work, tile, row, min(even, seen - 1))
                two, two_lane = _value_at(work, tile, row, min(even + 1, seen - 1))
                sees_one, sees_two = start <= even < seen, start <= even + 1 < seen
                _join_values(work.dims, one, one_lane, sees_one, two, two_lane, sees_two, values + 64 * pair)
            add_block(work, tile, (row - tile.first) * work.q_per_kv, work.q_per_kv, block, values, weights)


@subroutine
def _value_at(work: Any, tile: Any, row: int, position: int) -> Any:
    """Return the address of a head's values in the block of a row's position, and the lane there."""
    slot = slot_at(work, row, position)
    block = work.values + (int_at(tile.table + 4 * (slot // LANES)) * work.kv_heads + tile.head) * head_bytes(work.dims)
    return block, slot % LANES


@subroutine
def _join_values(
    dims: int, even: int, even_lane: int, even_seen: int, odd: int, odd_lane: int, odd_seen: int, place: int
) -> None:
    """Write pairs of two values, a vector for each 16 dimensions; zeros for one that is not seen. even, odd: addresses
    of one head's values of a block.
    """
    for group in range(dims // GROUP):
        scale = float16_at(value_scales_at(even, dims, group) + 2 * even_lane) if even_seen else np.float32(0)
        other = float16_at(value_scales_at(odd, dims, group) + 2 * odd_lane) if odd_seen else np.float32(0)
        one, two = value_codes_at(even, dims, even_lane, group), value_codes_at(odd, dims, odd_lane, group)
        _join_group(one, scale, two, other, place + group * (GROUP // LANES) * PANEL_BYTES)


@intrinsic(prefer_literal=True)
def _join_group(context: Any, even: Any, scale: Any, odd: Any, other: Any, place: Any) -> Any:
    """Return pairs of the 32 codes each at `even` and `odd`, times their scales, rounded to bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        even, scale, odd, other, place = args
        factors = spread(builder, scale), spread(builder, other)
        for half in range(GROUP // LANES):
            both = [
                builder.fmul(numbers(builder, builder.add(at, _WORD(LANES * half))), factor)
                for at, factor in zip((even, odd), factors, strict=True)
            ]
            kind = ir.FunctionType(_HALVES, [one.type for one in both])
            apart = builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", both, side_effect=False)
            order = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
            pairs = builder.shuffle_vector(apart, apart, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order))
            goal = builder.add(place, _WORD(PANEL_BYTES * half))
            builder.store(pairs, pointer(builder, goal, _HALVES), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.float32, types.int64), generate


_attend_all = attending(_score_all, _weigh_all, _weigh_own)


@kernel(ATTENTION)
def code_pair_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
