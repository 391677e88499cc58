"""Exact attention in vectors of 16 float32 numbers, for any processor and both types.

Scores are computed for 16 keys at once, each lane summing over the dimensions in order; values are added one by one in
the order of positions. Queries of the heads that share keys, and of neighbouring rows, share the loads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from engine.kernels.attention.attention_work import (
    ATTENTION,
    equal_part,
    first_seen,
    is_own,
    last_slot,
    put_shares,
    softmax,
)
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
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, thread_id

VECTORS, MOST_VECTORS = 12, 24
"""Queries of a tile, and what they may become where that leaves enough tiles for the threads."""
_WEIGHED, _KEPT_BYTES = 6, 1 << 14
"""Queries whose values are summed at once, and bytes of values that stay in the first level of cache for all queries of
a tile.
"""
_SCORED, _SLAB = (12, 4) if "+avx512f" in features() else (6, 1)
"""Queries that are scored in one pass over the keys, and vectors of 16 dimensions in which values are summed: as many
as fit into the vector registers.
"""


def attending(score: Any, weigh: Any) -> Any:
    """Return a thread's share of a layer's attention, as a function for kernels. A unit of work is a tile with one KV
    head: all rows of the tile with that head and the query heads that share it.

    score(work, queries, count, table, head, low, high, scores, scratch): the products of `count` queries with the
    blocks from low to high. weigh(work, table, head, start, end, count, weights, sums, scratch): add the weighted
    values at slots start to end to the sums of `count` queries. weights: those of slot `start`, a row for each query.
    scratch: what is left of the thread's.
    """

    @subroutine
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
        if start < end:
            weights = scores + vector * work.step * 4 + 4 * start
            weigh(work, table, head, start, end, count, weights, sums + vector * work.dims * 4, scratch)

    @subroutine
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
                    slot = int_at(work.ancestor_slots + 4 * (begin + i))
                    weights = scores + vector * step + 4 * (prefix + i)
                    weigh(work, table, head, slot, slot + 1, work.q_per_kv, weights, place, rest)

        for row in range(first, end):
            for group in range(work.q_per_kv):
                vector = (row - first) * work.q_per_kv + group
                share = divide(splat(np.float32(1)), splat(float_at(sums + (count * work.dims + vector) * 4)))
                place = work.out + ((row * work.kv_heads + head) * work.q_per_kv + group) * work.head_dim * work.width
                put_shares(work, sums + vector * work.dims * 4, share, place)

    @subroutine
    def attend_all(work: Any) -> None:
        scratch = work.scratch + thread_id() * work.scratch_bytes
        for head in range(work.kv_heads):
            for tile in range(work.tile_count):
                if is_own(work, tile, head):
                    attend(work, tile, head, scratch)

    return attend_all


def _scores_of(size: int) -> Any:
    @subroutine
    def scores(dims: int, count: int, queries: int, keys: int, scores: int, step: int) -> None:
        """Compute the products of `count` queries with one block of keys."""
        done = 0
        while done < count:
            rows = equal_part(count - done, _SCORED)
            scores_of(_SCORED, size, rows, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += rows

    return scores


def _sums_of(size: int) -> Any:
    @subroutine
    def sums(work: Any, count: int, weights: int, start: int, end: int, table: int, values: int, sums: int) -> None:
        """Add the weighted values at slots start to end to the sums of `count` queries."""
        dims, step, block_bytes = work.dims, work.step * 4, work.kv_heads * work.dims * LANES * size
        whole = dims // (_SLAB * LANES) * _SLAB * LANES
        done = 0
        while done < count:
            rows = equal_part(count - done, _WEIGHED)
            of, to = weights + done * step, sums + done * dims * 4
            for i in range(0, whole, _SLAB * LANES):
                here, place = values + i * size, to + 4 * i
                weigh(_WEIGHED, _SLAB, size, rows, dims, of, step, start, end, table, here, block_bytes, place)
            if _SLAB > 1:
                for i in range(whole, dims, LANES):
                    here, place = values + i * size, to + 4 * i
                    weigh(_WEIGHED, 1, size, rows, dims, of, step, start, end, table, here, block_bytes, place)
            done += rows

    return sums


_scores_of_halves, _scores_of_floats = _scores_of(BFLOAT16), _scores_of(FLOAT32)
_sums_of_halves, _sums_of_floats = _sums_of(BFLOAT16), _sums_of(FLOAT32)


@subroutine
def _score_all(
    work: Any, queries: int, count: int, table: int, head: int, low: int, high: int, scores: int, scratch: int
) -> None:
    for block in range(low, high):
        at = work.keys + (int_at(table + 4 * block) * work.kv_heads + head) * work.dims * LANES * work.width
        if work.width == BFLOAT16:
            _scores_of_halves(work.dims, count, queries, at, scores + 4 * LANES * block, work.step * 4)
        else:
            _scores_of_floats(work.dims, count, queries, at, scores + 4 * LANES * block, work.step * 4)


@subroutine
def _weigh(
    work: Any, table: int, head: int, start: int, end: int, count: int, weights: int, sums: int, scratch: int
) -> None:
    block_bytes, begin = work.dims * LANES * work.width, start
    values, blocks = work.values + head * block_bytes, max(1, _KEPT_BYTES // block_bytes)
    while begin < end:
        stop, of = min(end, (begin // LANES + blocks) * LANES), weights + 4 * (begin - start)
        if work.width == BFLOAT16:
            _sums_of_halves(work, count, of, begin, stop, table, values, sums)
        else:
            _sums_of_floats(work, count, of, begin, stop, table, values, sums)
        begin = stop


_attend_all = attending(_score_all, _weigh)


@kernel(ATTENTION)
def lane_kernel(address: Any) -> None:
    _attend_all(carray(address, 1)[0])
