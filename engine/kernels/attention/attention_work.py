"""What the kernels of exact attention share: the record of a layer's work, and the softmax.

A row sees the first `prefix` positions of its request's text and then a list of its ancestors in the tree, as slot
numbers of the request. No mask is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

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
            "tile_count",
            "rows",
            # of a layer: addresses
            "keys",  # one layer's part of the pool (`engine.model.kv_pool`)
            "values",
            "sinks",  # [heads] float32, or 0
            "tile_sizes",  # AMX: [17, 64], the tile configuration for each number of queries
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


@njit
def first_seen(work: Any, row: int) -> Any:
    """Return the first position that the row sees."""
    if work.window == 0:
        return 0
    seen = int_at(work.prefix_lens + 4 * row)
    seen += int_at(work.ancestor_ptr + 4 * row + 4) - int_at(work.ancestor_ptr + 4 * row)
    return max(0, seen - work.window)


@njit
def last_slot(work: Any, row: int) -> Any:
    last, end = int_at(work.prefix_lens + 4 * row) - 1, int_at(work.ancestor_ptr + 4 * row + 4)
    if end > int_at(work.ancestor_ptr + 4 * row):
        last = max(last, int_at(work.ancestor_slots + 4 * (end - 1)))
    return last


@njit
def softmax(work: Any, row: int, head: int, scores: int, weights: int, width: int) -> Any:
    """Write exp(score - largest) of each score that the row sees to `weights`, by position, and return their sum.

    scores: by slot, overwritten. Weights are float32 or bfloat16, per `width`, and fill whole vectors of 16 positions.
    """
    start, seen = first_seen(work, row), _by_position(work, row, scores)
    low, high = start // LANES * LANES, (seen + LANES - 1) // LANES * LANES
    scale = work.scale
    if work.softcap != 0:
        scale = np.float32(1)
        _cap(work, scores, start, seen)
    peak = splat(np.float32(-np.inf))
    for position in range(low, high, LANES):
        peak = maximum(load(scores + 4 * position, FLOAT32), peak)
    top = largest(peak) * scale
    if work.sinks != 0:
        top = max(top, float_at(work.sinks + 4 * head))
    factor, negative = splat(scale * _LOG2_E), splat(-top * _LOG2_E)
    sums = splat(np.float32(0))
    for position in range(low, high, LANES):
        weight = exp2(fma(load(scores + 4 * position, FLOAT32), factor, negative))
        if width == BFLOAT16:
            store(weight, weights + 2 * position, BFLOAT16)
        else:
            store(weight, weights + 4 * position, FLOAT32)
        sums = add(sums, weight)
    sum_of = total(sums)
    if work.sinks != 0:
        sum_of += largest(exp(splat(float_at(work.sinks + 4 * head) - top)))
    return sum_of


@njit
def _by_position(work: Any, row: int, scores: int) -> Any:
    """Move the ancestors' scores to their positions and mask what the row does not see; return its positions' end."""
    prefix, begin = int_at(work.prefix_lens + 4 * row), int_at(work.ancestor_ptr + 4 * row)
    seen = prefix + int_at(work.ancestor_ptr + 4 * row + 4) - begin
    for i in range(seen - prefix):  # their slots ascend and are never before their positions
        put_float(scores + 4 * (prefix + i), float_at(scores + 4 * int_at(work.ancestor_slots + 4 * (begin + i))))
    start = first_seen(work, row)
    for position in range(start // LANES * LANES, start):
        put_float(scores + 4 * position, np.float32(-np.inf))
    for position in range(seen, (seen + LANES - 1) // LANES * LANES):
        put_float(scores + 4 * position, np.float32(-np.inf))
    return seen


@njit
def _cap(work: Any, scores: int, start: int, seen: int) -> None:
    """Compute scores = softcap * tanh(scale * scores / softcap)."""
    cap, one, ratio = splat(work.softcap), splat(np.float32(1)), splat(np.float32(2) * work.scale / work.softcap)
    for position in range(start // LANES * LANES, seen, LANES):
        raised = exp(multiply(load(scores + 4 * position, FLOAT32), ratio))
        x = multiply(cap, fma(splat(np.float32(-2)), divide(one, add(raised, one)), one))
        if position < start or position + LANES > seen:  # masked scores stay masked
            x = _hide(x, scores + 4 * position, position, start, seen)
        store(x, scores + 4 * position, FLOAT32)


@njit
def _hide(x: Any, place: int, position: int, start: int, seen: int) -> Any:
    store(x, place, FLOAT32)
    for lane in range(LANES):
        if position + lane < start or position + lane >= seen:
            put_float(place + 4 * lane, np.float32(-np.inf))
    return load(place, FLOAT32)


@njit
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
