"""What the exact bfloat16 attentions over paired keys and values share: see `tile_attention`, for AMX, and
`pair_attention`, for AVX512-BF16.

A tile holds the queries of some neighbouring rows and of the heads that share keys. Scores are its products with blocks
of 16 keys; sums of values are products of its weights, rounded to bfloat16, with blocks of 16 values, one block of
positions after the other. Blocks that lie where all rows see them are read in place, with weights of zero for the
positions that a row does not see. After these comes the tail: the blocks of rows with ancestors, gathered for each row
from its ancestors' slots, with zeros for what it does not see. Zeros add nothing, not even a rounding, so a row's sums
are the same bits whichever blocks it shares with its neighbours.

A long text is read in chunks of blocks, whose keys, values and scores stay in the caches for all queries of a tile:
once for each query's largest score, and once more for its weights. Every number is the same as in one chunk.

An infinity or NaN times the zero weight of a row that does not see it is NaN. So where a sum is not finite, each row is
weighed again by itself, with all of its blocks gathered: its result is a function of what it sees, whatever that is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, TILE_ROWS, fetch
from engine.kernels.attention.attention_work import (
    finish_scores,
    first_seen,
    greatest,
    is_own,
    largest_scores,
    last_slot,
    move_ancestors,
    put_shares,
    seen_end,
    seen_vectors,
    sink_weight,
    weights_of,
)
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    divide,
    fma,
    int_at,
    load,
    pointer,
    splat,
    store,
    total,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import thread_id

PANEL_BYTES = 512
"""Bytes of 16 dimensions of a block's values."""
WEIGHT_BYTES = 2 * LANES
"""Bytes of a row of weights in a block."""
STATE_BYTES = 8 * LANES
"""Bytes of a query's largest scores and sums of weights."""
_AHEAD = 4  # the block so far ahead is prefetched
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


class Tile(NamedTuple):
    """A unit of work: the queries of a tile's rows for the heads that share one KV head."""

    first: int  # rows
    end: int
    head: int
    vectors: int  # queries
    table: int  # addresses: the request's blocks, [vectors, dims] queries
    queries: int
    low: int  # blocks: the first that a row sees, the first of the tail, the end
    tail: int
    high: int
    scores: int  # addresses of scratch: [vectors, step] float32
    weights: int  # [vectors, step] bfloat16
    states: int  # [vectors, 2, 16] float32: largest scores, and sums of weights
    sums: int  # [vectors, dims] float32: sums of values
    own: int  # `scratch_of_own`
    rest: int  # what is left


def attending(score: Any, weigh: Any, weigh_own: Any) -> Any:
    """Return a thread's share of a layer's attention, as a function for kernels.

    score(work, tile, begin, stop, scores): the products of a tile's queries with the blocks from begin to stop.
    weigh(work, tile, begin, stop, weights): add the values of these blocks, read in place, times weights to its sums.
    weigh_own(work, tile, begin, stop, weights): the same, with what each row sees of them gathered. scores, weights:
    addresses where those of position 0 would be.
    """

    @subroutine
    def score_blocks(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
        """Compute scores, capped, and hidden where a row does not see them."""
        score(work, tile, begin, stop, scores)
        for row in range(tile.first, tile.end):
            low, high = seen_vectors(work, row, begin, stop)
            for vector in _queries_of(work, tile, row):
                of = scores + vector * work.step * 4
                if begin >= tile.tail:
                    move_ancestors(work, row, of)
                finish_scores(work, row, of, low, high)

    @subroutine
    def add_values(work: Any, tile: Any, gathered: bool) -> None:
        """Sum the weights and the weighted values. gathered: each row's by itself, in every block."""
        _clear_sums(work, tile)
        chunk = min(work.chunk, tile.tail - tile.low)
        for begin in range(tile.low, tile.tail, work.chunk):
            stop = min(begin + work.chunk, tile.tail)
            scores, weights = tile.scores - 64 * begin, tile.weights - WEIGHT_BYTES * begin
            if chunk < tile.tail - tile.low:  # the scores are those of a later chunk
                score_blocks(work, tile, begin, stop, scores)
            _see_weights(work, tile, begin, stop, scores, weights)
            if gathered:
                weigh_own(work, tile, begin, stop, weights)
            else:
                weigh(work, tile, begin, stop, weights)
        weights = tile.weights + WEIGHT_BYTES * (chunk - tile.tail)
        _see_weights(work, tile, tile.tail, tile.high, tile.scores + 64 * (chunk - tile.tail), weights)
        weigh_own(work, tile, tile.tail, tile.high, weights)

    @subroutine
    def attend(work: Any, tile: Any) -> None:
        """Attend with a tile's queries."""
        for vector in range(tile.vectors):
            store(splat(np.float32(-np.inf)), tile.states + vector * STATE_BYTES, FLOAT32)
        for begin in range(tile.low, tile.tail, work.chunk):
            stop, scores = min(begin + work.chunk, tile.tail), tile.scores - 64 * begin
            score_blocks(work, tile, begin, stop, scores)
            _see_largest(work, tile, begin, stop, scores)
        scores = tile.scores + 64 * (min(work.chunk, tile.tail - tile.low) - tile.tail)
        score_blocks(work, tile, tile.tail, tile.high, scores)
        _see_largest(work, tile, tile.tail, tile.high, scores)

        add_values(work, tile, False)
        if not _all_finite(tile.sums, tile.vectors * work.dims):
            for row in range(tile.first, tile.end):
                add_values(work, _row_alone(work, tile, row), True)
        _put(work, tile)

    @subroutine
    def attend_all(work: Any) -> None:
        scratch = work.scratch + thread_id() * work.scratch_bytes
        for head in range(work.kv_heads):
            for tile in range(work.tile_count):
                if is_own(work, tile, head):
                    attend(work, _tile_of(work, tile, head, scratch))

    return attend_all


@subroutine
def _tile_of(work: Any, number: int, head: int, scratch: int) -> Any:
    """Return tile `number` for one KV head. The tail begins at the first block that some row with ancestors does not
    see whole.
    """
    first, end = int_at(work.tiles + 4 * number), int_at(work.tiles + 4 * number + 4)
    low, tail, high = 1 << 40, 1 << 40, 0
    for row in range(first, end):
        low = min(low, first_seen(work, row) // LANES)
        high = max(high, last_slot(work, row) // LANES + 1)
        if int_at(work.ancestor_ptr + 4 * row) < int_at(work.ancestor_ptr + 4 * row + 4):
            tail = min(tail, int_at(work.prefix_lens + 4 * row) // LANES)
    tail = min(max(low, tail), high)
    count = (end - first) * work.q_per_kv
    table = work.tables + 4 * int_at(work.table_of + 4 * first)
    queries = work.queries + (head * work.rows + first) * work.q_per_kv * work.dims * 2
    weights = scratch + count * work.step * 4
    states = weights + count * work.step * 2
    sums = states + count * STATE_BYTES
    own = sums + count * work.dims * 4
    rest = own + scratch_of_own(work.dims)
    return Tile(first, end, head, count, table, queries, low, tail, high, scratch, weights, states, sums, own, rest)


@subroutine
def _row_alone(work: Any, tile: Any, row: int) -> Any:
    """Return one row of a tile as a tile, whose scratch is its part of the tile's."""
    count, before = work.q_per_kv, (row - tile.first) * work.q_per_kv
    return Tile(
        row,
        row + 1,
        tile.head,
        count,
        tile.table,
        tile.queries + before * work.dims * 2,
        tile.low,
        tile.tail,
        tile.high,
        tile.scores + before * work.step * 4,
        tile.weights + before * work.step * 2,
        tile.states + before * STATE_BYTES,
        tile.sums + before * work.dims * 4,
        tile.own,
        tile.rest,
    )


@subroutine
def _see_largest(work: Any, tile: Any, begin: int, stop: int, scores: int) -> None:
    """Add the scores of the blocks from begin to stop to each query's largest."""
    for row in range(tile.first, tile.end):
        low, high = seen_vectors(work, row, begin, stop)
        for vector in _queries_of(work, tile, row):
            state = tile.states + vector * STATE_BYTES
            peak = largest_scores(scores + vector * work.step * 4, low, high, load(state, FLOAT32))
            store(peak, state, FLOAT32)


@subroutine
def _see_weights(work: Any, tile: Any, begin: int, stop: int, scores: int, weights: int) -> None:
    """Write the weights of the blocks from begin to stop, zeros where a row sees none, and add them to its sum."""
    for row in range(tile.first, tile.end):
        low, high = seen_vectors(work, row, begin, stop)
        for vector in _queries_of(work, tile, row):
            head = tile.head * work.q_per_kv + vector % work.q_per_kv
            state, to = tile.states + vector * STATE_BYTES, weights + vector * work.step * 2
            top, sums = greatest(work, head, load(state, FLOAT32)), load(state + 4 * LANES, FLOAT32)
            sums = weights_of(work, scores + vector * work.step * 4, low, high, top, to, BFLOAT16, sums)
            store(sums, state + 4 * LANES, FLOAT32)
            for position in range(begin * LANES, min(low, stop * LANES), LANES):
                store(splat(np.float32(0)), to + 2 * position, BFLOAT16)
            for position in range(max(high, begin * LANES), stop * LANES, LANES):
                store(splat(np.float32(0)), to + 2 * position, BFLOAT16)


@subroutine
def _queries_of(work: Any, tile: Any, row: int) -> Any:
    """Return the queries of a row of a tile."""
    begin = (row - tile.first) * work.q_per_kv
    return range(begin, begin + work.q_per_kv)


@subroutine
def _clear_sums(work: Any, tile: Any) -> None:
    for vector in range(tile.vectors):
        store(splat(np.float32(0)), tile.states + vector * STATE_BYTES + 4 * LANES, FLOAT32)
    for i in range(0, tile.vectors * work.dims, LANES):
        store(splat(np.float32(0)), tile.sums + 4 * i, FLOAT32)


@subroutine
def _put(work: Any, tile: Any) -> None:
    """Write each query's sums, divided by the sum of its weights."""
    for vector in range(tile.vectors):
        row, group = tile.first + vector // work.q_per_kv, vector % work.q_per_kv
        head, state = tile.head * work.q_per_kv + group, tile.states + vector * STATE_BYTES
        top = greatest(work, head, load(state, FLOAT32))
        weight = total(load(state + 4 * LANES, FLOAT32)) + sink_weight(work, head, top)
        place = work.out + ((row * work.kv_heads + tile.head) * work.q_per_kv + group) * work.head_dim * 2
        put_shares(work, tile.sums + vector * work.dims * 4, divide(splat(np.float32(1)), splat(weight)), place)


@subroutine
def place_of(work: Any, keys_or_values: int, tile: Any, block: int) -> Any:
    """Return the address of a tile's head's part of a block of 16 positions."""
    return keys_or_values + (int_at(tile.table + 4 * block) * work.kv_heads + tile.head) * work.dims * WEIGHT_BYTES


@subroutine
def next_block(work: Any, keys_or_values: int, tile: Any, block: int, stop: int) -> Any:
    """Return the address of a head's part of the block to read now. A later block, before `stop`, is prefetched, since
    the blocks of a text lie anywhere.
    """
    fetch_block(work, keys_or_values, tile, min(block + _AHEAD, stop - 1))
    return place_of(work, keys_or_values, tile, block)


@subroutine
def fetch_block(work: Any, keys_or_values: int, tile: Any, block: int) -> None:
    """Prefetch a tile's head's part of a block."""
    place = place_of(work, keys_or_values, tile, block)
    for line in range(0, work.dims * WEIGHT_BYTES, LINE_BYTES):
        fetch(place + line)


@subroutine
def scratch_of_own(dims: int) -> Any:
    """Return the bytes for a vector of zeros, a tile's weights (zeros except for one row's), and that row's values."""
    return 2 * WEIGHT_BYTES + TILE_ROWS * WEIGHT_BYTES + dims * WEIGHT_BYTES


@subroutine
def _all_finite(sums: int, count: int) -> Any:
    """Return whether so many float32, a multiple of 32, are all finite."""
    zero = splat(np.float32(0))
    one, two = zero, zero  # NaN once a number was not finite
    for i in range(0, count, 2 * LANES):
        one = fma(load(sums + 4 * i, FLOAT32), zero, one)
        two = fma(load(sums + 4 * (i + LANES), FLOAT32), zero, two)
    return total(add(one, two)) == 0


@subroutine
def own_blocks(work: Any, row: int, begin: int, stop: int) -> Any:
    """Return the range of the blocks from begin to stop that the row sees any of."""
    low, high = seen_vectors(work, row, begin, stop)
    return low // LANES, high // LANES


@subroutine
def gather(work: Any, tile: Any, row: int, position: int, panel: int, panels: int, place: int, zeros: int) -> None:
    """Gather the values at 16 positions of a row, laid out like a block's."""
    start, seen = first_seen(work, row), seen_end(work, row)
    for pair in range(LANES // 2):
        even, even_half = _value_at(work, tile, row, position + 2 * pair, start, seen, panel)
        odd, odd_half = _value_at(work, tile, row, position + 2 * pair + 1, start, seen, panel)
        for i in range(panels):
            even_at = zeros if even == 0 else even + i * PANEL_BYTES
            odd_at = zeros if odd == 0 else odd + i * PANEL_BYTES
            _join(even_at, even_half, odd_at, odd_half, place + i * PANEL_BYTES + pair * 64)


@subroutine
def slot_at(work: Any, row: int, position: int) -> Any:
    """Return the slot of the request in which a row's position is."""
    prefix = int_at(work.prefix_lens + 4 * row)
    if position < prefix:
        return position
    return int_at(work.ancestor_slots + 4 * (int_at(work.ancestor_ptr + 4 * row) + position - prefix))


@subroutine
def _value_at(work: Any, tile: Any, row: int, position: int, start: int, seen: int, panel: int) -> Any:
    """Return the address of the vector of pairs that holds the value, 0 if the row does not see it; and bits to shift
    it by.
    """
    if position < start or position >= seen:
        return 0, 0
    slot = slot_at(work, row, position)
    block = place_of(work, work.values, tile, slot // LANES)
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
