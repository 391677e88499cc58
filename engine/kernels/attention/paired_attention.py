"""What both exact bfloat16 attentions over paired keys and values share: see `tile_attention`, for AMX, and
`pair_attention`, for AVX512-BF16.

A tile holds the queries of up to 16 neighbouring rows and of the heads that share keys. Scores are its products with
blocks of 16 keys; sums of values are products of its weights, rounded to bfloat16, with blocks of 16 values, one block
of positions after the other. A block that all rows see is read in place. After these, each row has its own blocks,
gathered from its ancestors' slots, with zeros for what it does not see. Zeros add nothing, not even a rounding, so a
row's sums are the same bits whichever blocks it shares with its neighbours.

An infinity or NaN times the zero weight of a row that does not see it is NaN. So where a sum is not finite, each row is
weighed again by itself, with all of its blocks gathered: its result is a function of what it sees, whatever that is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, TILE_ROWS, fetch, pointer
from engine.kernels.attention.attention_work import first_seen, last_slot, put_shares, softmax
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    divide,
    float_at,
    fma,
    int_at,
    load,
    put_float,
    splat,
    store,
    total,
)
from engine.kernels.threads import num_threads, thread_id

PANEL_BYTES = 512
"""Bytes of 16 dimensions of a block's values."""
WEIGHT_BYTES = 2 * LANES
"""Bytes of a row of weights in a block."""
_AHEAD = 4  # the block so far ahead is prefetched
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


def attending(score: Any, weigh: Any) -> Any:
    """Return a thread's share of a layer's attention, as a function for kernels. A unit of work is a tile with one KV
    head: all rows of the tile with that head and the query heads that share it.

    score(work, queries, count, table, head, low, high, scores): the products of `count` queries with the blocks from
    low to high. weigh(work, table, head, first, end, low, common, weights, sums, own): the sums of values times weights
    for the rows from first to end, all of which see the blocks from low to common.
    """

    @njit
    def attend(work: Any, tile: int, head: int, scratch: int) -> None:
        first, end = int_at(work.tiles + 4 * tile), int_at(work.tiles + 4 * tile + 4)
        count = (end - first) * work.q_per_kv
        queries = work.queries + (head * work.rows + first) * work.q_per_kv * work.dims * 2
        table = work.tables + 4 * int_at(work.table_of + 4 * first)
        scores, weights, sums, shares, own = _places(work, count, scratch)

        low, high, common = 1 << 40, 0, 1 << 40  # blocks: the first that a row sees, the end, the end of those all see
        for row in range(first, end):
            low = min(low, first_seen(work, row) // LANES)
            high = max(high, last_slot(work, row) // LANES + 1)
            common = min(common, int_at(work.prefix_lens + 4 * row) // LANES)

        score(work, queries, count, table, head, low, high, scores)

        for row in range(first, end):
            for group in range(work.q_per_kv):
                vector = (row - first) * work.q_per_kv + group
                of, to = scores + vector * work.step * 4, weights + vector * work.step * 2
                put_float(shares + vector * 4, softmax(work, row, head * work.q_per_kv + group, of, to, BFLOAT16))
                for block in range(low, first_seen(work, row) // LANES):
                    store(splat(np.float32(0)), to + block * WEIGHT_BYTES, BFLOAT16)

        weigh(work, table, head, first, end, low, common, weights, sums, own)
        if not _all_finite(sums, count * work.dims):
            for row in range(first, end):
                vector, begun = (row - first) * work.q_per_kv, first_seen(work, row) // LANES
                of, to = weights + vector * work.step * 2, sums + vector * work.dims * 4
                weigh(work, table, head, row, row + 1, begun, begun, of, to, own)

        for vector in range(count):
            share = divide(splat(np.float32(1)), splat(float_at(shares + 4 * vector)))
            row, group = first + vector // work.q_per_kv, vector % work.q_per_kv
            place = work.out + ((row * work.kv_heads + head) * work.q_per_kv + group) * work.head_dim * 2
            put_shares(work, sums + vector * work.dims * 4, share, place)

    @njit
    def attend_all(work: Any) -> None:
        scratch = work.scratch + thread_id() * work.scratch_bytes
        for unit in range(thread_id(), work.tile_count * work.kv_heads, num_threads()):
            attend(work, unit // work.kv_heads, unit % work.kv_heads, scratch)

    return attend_all


@njit
def _place_of(work: Any, keys_or_values: int, table: int, block: int, head: int) -> Any:
    """Return the address of a head's part of a block of 16 positions."""
    return keys_or_values + (int_at(table + 4 * block) * work.kv_heads + head) * work.dims * WEIGHT_BYTES


@njit
def next_block(work: Any, keys_or_values: int, table: int, block: int, end: int, head: int) -> Any:
    """Return the address of a head's part of the block to read now. A later block, before `end`, is prefetched, since
    the blocks of a text lie anywhere.
    """
    ahead = _place_of(work, keys_or_values, table, min(block + _AHEAD, end - 1), head)
    for line in range(0, work.dims * WEIGHT_BYTES, LINE_BYTES):
        fetch(ahead + line)
    return _place_of(work, keys_or_values, table, block, head)


@njit
def _places(work: Any, count: int, scratch: int) -> Any:
    """Return addresses within `scratch`: scores, weights, sums, their shares, a row's own block with its weights."""
    weights = scratch + count * work.step * 4
    own = weights + count * work.step * 2
    sums = own + scratch_of_own(work.dims)
    return scratch, weights, sums, sums + count * work.dims * 4, own


@njit
def scratch_of_own(dims: int) -> Any:
    """Return the bytes for a vector of zeros, a tile's weights (zeros except for one row's), and that row's values."""
    return 2 * WEIGHT_BYTES + TILE_ROWS * WEIGHT_BYTES + dims * WEIGHT_BYTES


@njit
def _all_finite(sums: int, count: int) -> Any:
    """Return whether so many float32, a multiple of 32, are all finite."""
    zero = splat(np.float32(0))
    one, two = zero, zero  # NaN once a number was not finite
    for i in range(0, count, 2 * LANES):
        one = fma(load(sums + 4 * i, FLOAT32), zero, one)
        two = fma(load(sums + 4 * (i + LANES), FLOAT32), zero, two)
    return total(add(one, two)) == 0


@njit
def own_blocks(work: Any, row: int, common: int) -> Any:
    """Return a row's blocks after those that all rows of its tile see: the first, the end, and the end of its
    positions.
    """
    prefix, begun = int_at(work.prefix_lens + 4 * row), int_at(work.ancestor_ptr + 4 * row)
    seen = prefix + int_at(work.ancestor_ptr + 4 * row + 4) - begun
    return max(common, first_seen(work, row) // LANES), (seen + LANES - 1) // LANES, seen


@njit
def gather(
    work: Any,
    table: int,
    head: int,
    row: int,
    position: int,
    seen: int,
    panel: int,
    panels: int,
    place: int,
    zeros: int,
) -> None:
    """Gather the values at 16 positions of a row, laid out like a block's."""
    start = first_seen(work, row)
    for pair in range(LANES // 2):
        even, even_half = _value_at(work, table, head, row, position + 2 * pair, start, seen, panel)
        odd, odd_half = _value_at(work, table, head, row, position + 2 * pair + 1, start, seen, panel)
        for i in range(panels):
            even_at = zeros if even == 0 else even + i * PANEL_BYTES
            odd_at = zeros if odd == 0 else odd + i * PANEL_BYTES
            _join(even_at, even_half, odd_at, odd_half, place + i * PANEL_BYTES + pair * 64)


@njit
def slot_at(work: Any, row: int, position: int) -> Any:
    """Return the slot of the request in which a row's position is."""
    prefix = int_at(work.prefix_lens + 4 * row)
    if position < prefix:
        return position
    return int_at(work.ancestor_slots + 4 * (int_at(work.ancestor_ptr + 4 * row) + position - prefix))


@njit
def _value_at(work: Any, table: int, head: int, row: int, position: int, start: int, seen: int, panel: int) -> Any:
    """Return the address of the vector of pairs that holds the value, 0 if the row does not see it; and bits to shift
    it by.
    """
    if position < start or position >= seen:
        return 0, 0
    slot = slot_at(work, row, position)
    block = _place_of(work, work.values, table, slot // LANES, head)
    return block + panel * PANEL_BYTES + slot % LANES // 2 * 64, slot % 2 * 16


@intrinsic(prefer_literal=True)
def _join(context: Any, even: Any, even_half: Any, odd: Any, odd_half: Any, place: Any) -> Any:
    """Write 16 pairs to `place`, each of a half at `even` and one at `odd`: 0 for the lower half, 16 for the upper."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        even, even_half, odd, odd_half, place = args

        def half(address: ir.Value, bits: ir.Value) -> ir.Value:
            pairs = builder.load(pointer(builder, address, _INTS), align=4)
            anything = ir.Constant(_INTS, ir.Undefined)
            shift = builder.insert_element(anything, builder.trunc(bits, _INT), ir.Constant(_INT, 0))
            shift = builder.shuffle_vector(shift, anything, ir.Constant(_INTS, [0] * LANES))
            return builder.and_(builder.lshr(pairs, shift), ir.Constant(_INTS, [0xFFFF] * LANES))

        upper = builder.shl(half(odd, odd_half), ir.Constant(_INTS, [16] * LANES))
        builder.store(builder.or_(half(even, even_half), upper), pointer(builder, place, _INTS), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
