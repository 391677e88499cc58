"""The norm between two parts of a layer, which also adds what the part before has made to the residual.

Rows are independent: a row's result is the same bits whatever the other rows. Numbers are summed in float32 and rounded
once, when they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from engine.kernels.records import record_of
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    fma,
    int_at,
    load,
    multiply,
    numbers_at,
    put_numbers,
    splat,
    store,
    total,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

NORM = record_of(
    "residual",  # [rows, hidden] float32, to which delta is added
    "delta",  # [rows, hidden], or 0
    "delta_weight",  # [hidden] float32: the norm of delta is added; or 0
    "weight",  # [hidden] float32, or 0: no norm, out = residual
    "centred",  # 1: the mean is subtracted first
    "bias",  # [hidden] float32, added last, or 0
    "out",  # [count, hidden]: the norm of the sum
    "chosen",  # [count] int32: the rows to compute, or 0 for the first `count`
    "kept",  # [rows, hidden], rows `stride` bytes apart: a copy of the sum, or 0
    "stride",
    "count",
    "hidden",
    "width",
    floats=("epsilon", "delta_scale", "scale"),
)


@kernel(NORM)
def norm_kernel(address: Any) -> None:
    """Set residual = scale * (residual + delta_scale * delta), or norm(delta, delta_weight) in place of that delta;
    write out = norm(residual, weight), where norm(x, w) = x / sqrt(mean(x^2) + epsilon) * w, of x less its mean if
    centred, and the bias is added.
    """
    work = carray(address, 1)[0]
    for i in range(thread_id(), work.count, num_threads()):
        row = i if work.chosen == 0 else int_at(work.chosen + 4 * i)
        residual, delta = work.residual + row * work.hidden * 4, work.delta + row * work.hidden * work.width
        if work.delta_weight != 0:
            _add_norm(work, residual, delta)
        squares, sums = splat(np.float32(0)), splat(np.float32(0))
        for at in range(0, work.hidden, LANES):
            x = load(residual + 4 * at, FLOAT32)
            if work.delta != 0 and work.delta_weight == 0:
                x = fma(numbers_at(delta + at * work.width, work.width), splat(work.delta_scale), x)
                x = multiply(x, splat(work.scale))
                store(x, residual + 4 * at, FLOAT32)
            squares, sums = fma(x, x, squares), add(sums, x)
        below = splat(np.float32(0))  # minus the mean
        if work.centred != 0:
            below, squares = splat(-total(sums) / np.float32(work.hidden)), splat(np.float32(0))
            for at in range(0, work.hidden, LANES):
                x = add(load(residual + 4 * at, FLOAT32), below)
                squares = fma(x, x, squares)
        # without a norm there is no epsilon either, and a row of zeros (a padding token's) would be divided by 0
        scale = splat(_norm_scale(work, squares) if work.weight != 0 else np.float32(1))
        out = work.out + i * work.hidden * work.width
        for at in range(0, work.hidden, LANES):
            x = load(residual + 4 * at, FLOAT32)
            if work.kept != 0:
                put_numbers(x, work.kept + row * work.stride + at * work.width, work.width)
            if work.centred != 0:
                x = add(x, below)
            if work.weight != 0:
                x = multiply(multiply(x, scale), load(work.weight + 4 * at, FLOAT32))
            if work.bias != 0:
                x = add(x, load(work.bias + 4 * at, FLOAT32))
            put_numbers(x, out + at * work.width, work.width)


@subroutine
def _norm_scale(work: Any, squares: Any) -> Any:
    return np.float32(1) / np.sqrt(total(squares) / np.float32(work.hidden) + work.epsilon)


@subroutine
def _add_norm(work: Any, residual: int, delta: int) -> None:
    squares = splat(np.float32(0))
    for at in range(0, work.hidden, LANES):
        x = numbers_at(delta + at * work.width, work.width)
        squares = fma(x, x, squares)
    scale = splat(_norm_scale(work, squares))
    for at in range(0, work.hidden, LANES):
        x = multiply(numbers_at(delta + at * work.width, work.width), scale)
        x = fma(x, load(work.delta_weight + 4 * at, FLOAT32), load(residual + 4 * at, FLOAT32))
        store(multiply(x, splat(work.scale)), residual + 4 * at, FLOAT32)
