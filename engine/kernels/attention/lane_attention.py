"""Exact attention in vectors of 16 float32 numbers, for any processor and both types.

Scores are computed for 16 keys at once, each lane summing over the dimensions in order; values are added one by one in
the order of positions. Queries of the heads that share keys, and of neighbouring rows, share the loads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from engine.kernels.attention.attention_work import ATTENTION, first_seen, last_slot, put_shares, softmax
from engine.kernels.attention.lane_products import scores_of, weigh
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    divide,
    features,
    float_at,
    int_at,
    put_float,
    splat,
    store,
)
from engine.kernels.threads import kernel, num_threads, thread_id

VECTORS = 12
"""Queries of a tile."""
_SCORED, _SLAB = (VECTORS, 4) if "+avx512f" in features() else (VECTORS // 2, 1)
"""Queries that are scored in one pass over the keys, and vectors of 16 dimensions in which up to 6 queries' values are
summed: as many as fit into the vector registers.
"""


def attending(score: Any, weigh: Any) -> Any:
    """Return a thread's share of a layer's attention, as a function for kernels. A unit of work is a tile with one KV
    head: all rows of the tile with that head and the query heads that share it.

    score(work, queries, count, table, head, low, high, scores, scratch): the products of `count` queries with the
    blocks from low to high. weigh(work, table, head, block, lane, many, last, count, weights, sums, scratch): add
    `many` weighted values, from a lane of a block on, to the sums of `count` queries. weights: of the first value, a
    row for each query; last: the block up to which later calls read on. scratch: what is left of the thread's.
    """

    @njit
    def add_values(
        work: Any,
        table: int,
        head: int,
        count: int,
        start: int,
        end: int,
        scores: int,
        sums: int,
        vector: int,
        scratch: int,
    ) -> None:
        """Add the weighted values at positions start to end to the sums of `count` queries from `vector` on."""
        position, last = start, (end - 1) // LANES
        while position < end:
            block, lane = position // LANES, position % LANES
            many = min(LANES - lane, end - position)
            weights = scores + vector * work.step * 4 + 4 * position
            place = sums + vector * work.dims * 4
            weigh(work, table, head, block, lane, many, last, count, weights, place, scratch)
            position += many

    @njit
    def attend(work: Any, tile: int, head: int, scratch: int) -> None:
        """Attend with all rows of a tile to one KV head, for the query heads that share it."""
        first, end = int_at(work.tiles + 4 * tile), int_at(work.tiles + 4 * tile + 4)
        count = (end - first) * work.q_per_kv
        scores, step = scratch, work.step * 4
        sums = scratch + count * step
        rest = sums + count * (work.dims + 1) * 4
        queries = work.queries + (head * work.rows + first) * work.q_per_kv * work.dims * 4
        table = work.tables + 4 * int_at(work.table_of + 4 * first)

        # low: first position seen; high: end of slots read; reach: common prefix
        low, high, reach = 1 << 40, 0, 1 << 40
        lows = 0
        for row in range(first, end):
            start = first_seen(work, row)
            low, lows = min(low, start), max(lows, start)
            reach = min(reach, int_at(work.prefix_lens + 4 * row))
            high = max(high, last_slot(work, row) + 1)

        score(work, queries, count, table, head, low // LANES, (high + LANES - 1) // LANES, scores, rest)

        for row in range(first, end):
            for group in range(work.q_per_kv):
                vector = (row - first) * work.q_per_kv + group
                at = scores + vector * step
                sum_of = softmax(work, row, head * work.q_per_kv + group, at)
                for i in range(0, work.dims, LANES):
                    store(splat(np.float32(0)), sums + (vector * work.dims + i) * 4, FLOAT32)
                put_float(sums + (count * work.dims + vector) * 4, sum_of)

        for row in range(first, end):  # from the row's own start to the positions that all rows see
            vector = (row - first) * work.q_per_kv
            stop = min(lows, int_at(work.prefix_lens + 4 * row))
            add_values(work, table, head, work.q_per_kv, first_seen(work, row), stop, scores, sums, vector, rest)
        if lows < reach:
            add_values(work, table, head, count, lows, reach, scores, sums, 0, rest)
        for row in range(first, end):
            vector, prefix = (row - first) * work.q_per_kv, int_at(work.prefix_lens + 4 * row)
            start = max(lows, reach, first_seen(work, row)) if lows < reach else max(lows, first_seen(work, row))
            add_values(work, table, head, work.q_per_kv, start, prefix, scores, sums, vector, rest)
            begin, place = int_at(work.ancestor_ptr + 4 * row), sums + vector * work.dims * 4
            for i in range(int_at(work.ancestor_ptr + 4 * row + 4) - begin):
                if prefix + i >= first_seen(work, row):
                    block, lane = divmod(int_at(work.ancestor_slots + 4 * (begin + i)), LANES)
                    weights = scores + vector * step + 4 * (prefix + i)
                    weigh(work, table, head, block, lane, 1, block, work.q_per_kv, weights, place, rest)

        for row in range(first, end):
            for group in range(work.q_per_kv):
                vector = (row - first) * work.q_per_kv + group
                share = divide(splat(np.float32(1)), splat(float_at(sums + (count * work.dims + vector) * 4)))
                place = work.out + ((row * work.kv_heads + head) * work.q_per_kv + group) * work.head_dim * work.width
                put_shares(work, sums + vector * work.dims * 4, share, place)

    @njit
    def attend_all(work: Any) -> None:
        scratch = work.scratch + thread_id() * work.scratch_bytes
        for unit in range(thread_id(), work.tile_count * work.kv_heads, num_threads()):
            attend(work, unit // work.kv_heads, unit % work.kv_heads, scratch)

    return attend_all


def _scores_of(size: int) -> Any:
    @njit
    def scores(dims: int, count: int, queries: int, keys: int, scores: int, step: int) -> None:
        """Compute the products of `count` queries with one block of keys."""
        done = 0
        while count - done >= _SCORED:
            scores_of(_SCORED, size, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += _SCORED
        while count - done >= 3:
            scores_of(3, size, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 3
        while count > done:
            scores_of(1, size, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 1

    return scores


def _sums_of(size: int) -> Any:
    @njit
    def sums(dims: int, count: int, weights: int, step: int, many: int, values: int, sums: int) -> None:
        """Add `many` weighted values to the sums of `count` queries."""
        slab = _SLAB * LANES
        for first in range(0, dims, slab):
            done, here = 0, values + first * size
            while done < count:
                of, place = weights + done * step, sums + (done * dims + first) * 4
                if dims - first < slab:  # a narrower remainder, 16 dimensions at a time
                    for i in range(0, dims - first, LANES):
                        weigh(1, 1, size, dims, of, step, many, here + i * size, place + 4 * i)
                    done += 1
                elif count - done >= 6:
                    weigh(6, _SLAB, size, dims, of, step, many, here, place)
                    done += 6
                elif count - done >= 3:
                    weigh(3, _SLAB, size, dims, of, step, many, here, place)
                    done += 3
                else:
                    weigh(1, _SLAB, size, dims, of, step, many, here, place)
                    done += 1

    return sums


_scores_of_halves, _scores_of_floats = _scores_of(BFLOAT16), _scores_of(FLOAT32)
_sums_of_halves, _sums_of_floats = _sums_of(BFLOAT16), _sums_of(FLOAT32)


@njit
def _score_all(
    work: Any, queries: int, count: int, table: int, head: int, low: int, high: int, scores: int, scratch: int
) -> None:
    for block in range(low, high):
        at = work.keys + (int_at(table + 4 * block) * work.kv_heads + head) * work.dims * LANES * work.width
        if work.width == BFLOAT16:
            _scores_of_halves(work.dims, count, queries, at, scores + 4 * LANES * block, work.step * 4)
        else:
            _scores_of_floats(work.dims, count, queries, at, scores + 4 * LANES * block, work.step * 4)


@njit
def _weigh(
    work: Any,
    table: int,
    head: int,
    block: int,
    lane: int,
    many: int,
    last: int,
    count: int,
    weights: int,
    sums: int,
    scratch: int,
) -> None:
    at = (int_at(table + 4 * block) * work.kv_heads + head) * work.dims * LANES
    values = work.values + (at + lane * work.dims) * work.width
    if work.width == BFLOAT16:
        _sums_of_halves(work.dims, count, weights, work.step * 4, many, values, sums)
    else:
        _sums_of_floats(work.dims, count, weights, work.step * 4, many, values, sums)


_attend_all = attending(_score_all, _weigh)


@kernel(ATTENTION)
def lane_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
