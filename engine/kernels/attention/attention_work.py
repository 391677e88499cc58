"""What the kernels of exact attention share: the record of a layer's work, and the softmax.

A row sees the first `prefix` positions of its request's text and then a list of its ancestors in the tree, as slot
numbers of the request. No mask is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.exponential import exp, exp2
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    divide,
    float_at,
    fma,
    int_at,
    largest,
    load,
    maximum,
    multiply,
    put_float,
    put_half,
    splat,
    store,
    total,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import num_threads, thread_id

_LOG2_E = np.float32(np.log2(np.e))

ATTENTION = np.dtype(
    [
        (name, "i8")
        for name in (
            # of a batch: addresses
            "tables",  # int32: each request's blocks
            "table_of",  # [rows] int32: where in `tables` the row's request begins
            "prefix_lens",  # [rows] int32
            "ancestor_ptr",  # [rows + 1] int32: where in `ancestor_slots` the row's list begins
            "ancestor_slots",  # int32: slot numbers of the request, ascending
            "tiles",  # [tiles + 1] int32: the first row of each tile; a tile's rows are of one request
            "queries",  # [kv_heads, rows, q_per_kv, dims] float32, or bfloat16 if paired
            "scratch",  # [threads, scratch_bytes]
            # and sizes
            "scratch_bytes",
            "step",  # scores in a row of scratch, a multiple of 16
            "chunk",  # blocks before the tail whose scores are kept at a time
            "tile_count",
            "rows",
            # of a layer: addresses
            "keys",  # one layer's part of the pool (`engine.model.kv_pool`)
            "values",
            "sinks",  # [heads] float32, or 0
            "tile_sizes",  # AMX: [2, 17, 64], tile configurations for scores and for sums, for each number of queries
            "out",  # [rows, heads * head_dim]
            # and sizes
            "kv_heads",
            "q_per_kv",
            "dims",  # head_dim, rounded up to a multiple of 16
            "head_dim",
            "width",  # bytes of a number in keys, values and out
            "window",  # positions that a row sees, itself included; 0: all
        )
    ]
    + [("scale", "f4"), ("softcap", "f4")]  # softcap 0: none
)


@subroutine
def is_own(work: Any, tile: int, head: int) -> Any:
    """Return whether the calling thread attends with a tile to a KV head. A thread takes one head after the other: the
    keys of a long text then stay in the cache for all tiles.
    """
    return (tile * work.kv_heads + head) % num_threads() == thread_id()


@subroutine
def first_seen(work: Any, row: int) -> Any:
    """Return the first position that the row sees."""
    return 0 if work.window == 0 else max(0, seen_end(work, row) - work.window)


@subroutine
def last_slot(work: Any, row: int) -> Any:
    last, end = int_at(work.prefix_lens + 4 * row) - 1, int_at(work.ancestor_ptr + 4 * row + 4)
    if end > int_at(work.ancestor_ptr + 4 * row):
        last = max(last, int_at(work.ancestor_slots + 4 * (end - 1)))
    return last


@subroutine
def softmax(work: Any, row: int, head: int, scores: int) -> Any:
    """Overwrite each score that the row sees with exp(score - largest), by position, and return their sum.

    scores: by slot. What is written fills whole vectors of 16 positions.
    """
    move_ancestors(work, row, scores)
    low, high = seen_vectors(work, row, 0, 1 << 40)
    finish_scores(work, row, scores, low, high)
    top = greatest(work, head, largest_scores(scores, low, high, splat(np.float32(-np.inf))))
    sums = weights_of(work, scores, low, high, top, scores, FLOAT32, splat(np.float32(0)))
    return total(sums) + sink_weight(work, head, top)


@subroutine
def seen_end(work: Any, row: int) -> Any:
    """Return one more than the last position that the row sees."""
    seen = int_at(work.prefix_lens + 4 * row)
    return seen + int_at(work.ancestor_ptr + 4 * row + 4) - int_at(work.ancestor_ptr + 4 * row)


@subroutine
def seen_vectors(work: Any, row: int, begin: int, stop: int) -> Any:
    """Return the range of whole vectors of positions, in the blocks from begin to stop, that a row sees any of."""
    low = max(begin * LANES, first_seen(work, row) // LANES * LANES)
    return low, min(stop * LANES, (seen_end(work, row) + LANES - 1) // LANES * LANES)


@subroutine
def move_ancestors(work: Any, row: int, scores: int) -> None:
    """Move the scores of the ancestors that the row sees to their positions. There may be no room for the others'."""
    prefix, begin = int_at(work.prefix_lens + 4 * row), int_at(work.ancestor_ptr + 4 * row)
    count, unseen = int_at(work.ancestor_ptr + 4 * row + 4) - begin, first_seen(work, row) - prefix
    for i in range(max(0, unseen), count):  # their slots ascend, never before their positions
        put_float(scores + 4 * (prefix + i), float_at(scores + 4 * int_at(work.ancestor_slots + 4 * (begin + i))))


@subroutine
def finish_scores(work: Any, row: int, scores: int, low: int, high: int) -> None:
    """Cap the scores at the positions from low to high, and hide those that the row does not see. They may not have
    their scale yet.
    """
    start, seen = first_seen(work, row), seen_end(work, row)
    if work.softcap != 0:
        _cap(work, scores, low, high)
    for position in range(low, min(start, high)):
        put_float(scores + 4 * position, np.float32(-np.inf))
    for position in range(max(low, seen), high):
        put_float(scores + 4 * position, np.float32(-np.inf))


@subroutine
def largest_scores(scores: int, low: int, high: int, peak: Any) -> Any:
    """Return, for each lane, the largest of `peak` and of the scores from low to high."""
    for position in range(low, high, LANES):
        peak = maximum(load(scores + 4 * position, FLOAT32), peak)
    return peak


@subroutine
def greatest(work: Any, head: int, peak: Any) -> Any:
    """Return the largest score of a query, its sink included, with its scale."""
    top = largest(peak) * _scale(work)
    return max(top, float_at(work.sinks + 4 * head)) if work.sinks != 0 else top


@subroutine
def sink_weight(work: Any, head: int, top: Any) -> Any:
    """Return the weight of the head's sink, if it has one."""
    return largest(exp(splat(float_at(work.sinks + 4 * head) - top))) if work.sinks != 0 else np.float32(0)


@subroutine
def weights_of(work: Any, scores: int, low: int, high: int, top: Any, weights: int, width: int, sums: Any) -> Any:
    """Write exp(score - top) of the scores from low to high to `weights`, by position, and return `sums` with them.
    width: BFLOAT16 or FLOAT32.
    """
    factor, negative = splat(_scale(work) * _LOG2_E), splat(-top * _LOG2_E)
    for position in range(low, high, LANES):
        weight = exp2(fma(load(scores + 4 * position, FLOAT32), factor, negative))
        if width == BFLOAT16:
            store(weight, weights + 2 * position, BFLOAT16)
        else:
            store(weight, weights + 4 * position, FLOAT32)
        sums = add(sums, weight)
    return sums


@subroutine
def _scale(work: Any) -> Any:
    """Return the scale of scores; one, where their cap has applied it."""
    return np.float32(1) if work.softcap != 0 else work.scale


@subroutine
def _cap(work: Any, scores: int, low: int, high: int) -> None:
    """Compute scores = softcap * tanh(scale * scores / softcap)."""
    cap, one, ratio = splat(work.softcap), splat(np.float32(1)), splat(np.float32(2) * work.scale / work.softcap)
    for position in range(low, high, LANES):
        raised = exp(multiply(load(scores + 4 * position, FLOAT32), ratio))
        x = multiply(cap, fma(splat(np.float32(-2)), divide(one, add(raised, one)), one))
        store(x, scores + 4 * position, FLOAT32)


@subroutine
def put_shares(work: Any, sums: int, share: Any, place: int) -> None:
    """Write the sums, each times `share`, to the output."""
    whole = work.head_dim // LANES * LANES
    for i in range(0, whole, LANES):
        x = multiply(load(sums + 4 * i, FLOAT32), share)
        if work.width == BFLOAT16:
            store(x, place + i * 2, BFLOAT16)
        else:
            store(x, place + i * 4, FLOAT32)
    if whole < work.head_dim:  # the remainder of a head size that 16 does not divide
        store(multiply(load(sums + 4 * whole, FLOAT32), share), sums + 4 * whole, FLOAT32)
        for i in range(whole, work.head_dim):
            if work.width == BFLOAT16:
                put_half(place + i * 2, float_at(sums + 4 * i))
            else:
                put_float(place + i * 4, float_at(sums + 4 * i))


@subroutine
def equal_part(left: int, most: int) -> Any:
    """Return how many of the queries that are left to take next, if parts are as equal as they can be."""
    parts = (left + most - 1) // most
    return (left + parts - 1) // parts
