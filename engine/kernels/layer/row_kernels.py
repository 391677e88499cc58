"""Kernels that change rows in place: norms over all heads at once, gates, what layers get beside the residual, and what
caps or scales logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from engine.kernels.exponential import exp
from engine.kernels.records import record_of
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    divide,
    fma,
    largest,
    load,
    maximum,
    minimum,
    multiply,
    number_at,
    numbers_at,
    put_number,
    put_numbers,
    splat,
    total,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

ROW_NORM = record_of(
    "rows",
    "x",  # address of the first row's first column, [rows, columns]
    "stride",  # bytes from row to row
    "weight",  # [columns] float32
    "added",  # [rows, columns], which is added, or 0
    "columns",  # a multiple of 16
    "width",
    floats=("epsilon",),
)


@kernel(ROW_NORM)
def row_norm_kernel(address: Any) -> None:
    """Compute x = x / sqrt(mean(x^2) + epsilon) * weight + added."""
    work = carray(address, 1)[0]
    for row in range(thread_id(), work.rows, num_threads()):
        x = work.x + row * work.stride
        scale = _factor(work, x)
        for at in range(0, work.columns, LANES):
            numbers = multiply(numbers_at(x + at * work.width, work.width), scale)
            numbers = multiply(numbers, load(work.weight + 4 * at, FLOAT32))
            if work.added != 0:
                numbers = add(numbers, numbers_at(work.added + (row * work.columns + at) * work.width, work.width))
            put_numbers(numbers, x + at * work.width, work.width)


ROW_GATE = record_of(
    "rows",
    "x",  # [rows, columns]
    "gate",  # address of the first row's first gate, of [rows, columns] that lie `stride` bytes apart
    "stride",
    "columns",  # a multiple of 16
    "width",
)


@kernel(ROW_GATE)
def row_gate_kernel(address: Any) -> None:
    """Compute x = x * sigmoid(gate)."""
    work = carray(address, 1)[0]
    one = splat(np.float32(1))
    for row in range(thread_id(), work.rows, num_threads()):
        x, gate = work.x + row * work.columns * work.width, work.gate + row * work.stride
        for at in range(0, work.columns * work.width, LANES * work.width):
            down = exp(multiply(numbers_at(gate + at, work.width), splat(np.float32(-1))))
            put_numbers(divide(numbers_at(x + at, work.width), add(one, down)), x + at, work.width)


CLIP = record_of(
    "rows",
    "x",  # [rows, columns]
    "columns",  # a multiple of 16
    "width",
    floats=("limit",),
)


@kernel(CLIP)
def clip_kernel(address: Any) -> None:
    """Cut x at the limit and at its negative."""
    work = carray(address, 1)[0]
    most, least = splat(work.limit), splat(-work.limit)
    for row in range(thread_id(), work.rows, num_threads()):
        x = work.x + row * work.columns * work.width
        for at in range(0, work.columns * work.width, LANES * work.width):
            put_numbers(maximum(least, minimum(numbers_at(x + at, work.width), most)), x + at, work.width)


ROUND = record_of(
    "rows",
    "x",  # [rows, columns]
    "columns",  # a multiple of 16
    "width",
)
_LEAST = np.float32(1e-5)  # a row of smaller numbers is rounded as if this were the largest
_TO_WHOLE = np.float32(1.5 * 2**23)  # added to a small number and subtracted, this leaves the nearest whole number


@kernel(ROUND)
def round_kernel(address: Any) -> None:
    """Round each number of x to a multiple of a 127th of its row's largest amount, as BitNet's layers do."""
    work = carray(address, 1)[0]
    up, whole = splat(_TO_WHOLE), splat(-_TO_WHOLE)
    for row in range(thread_id(), work.rows, num_threads()):
        x, amounts = work.x + row * work.columns * work.width, splat(_LEAST)
        for at in range(0, work.columns * work.width, LANES * work.width):
            numbers = numbers_at(x + at, work.width)
            amounts = maximum(amounts, maximum(numbers, multiply(numbers, splat(np.float32(-1)))))
        scale = splat(np.float32(1) / largest(amounts) * np.float32(127))  # as torch divides by a tensor
        for at in range(0, work.columns * work.width, LANES * work.width):
            code = add(add(multiply(numbers_at(x + at, work.width), scale), up), whole)
            put_numbers(divide(code, scale), x + at, work.width)


LAYER_INPUTS = record_of(
    "rows",
    "x",  # [rows, layers, columns]
    "of_tokens",  # [rows, layers, columns] float32
    "weight",  # [columns] float32
    "layers",
    "columns",  # a multiple of 16
    "width",
    floats=("epsilon", "scale"),
)


@kernel(LAYER_INPUTS)
def layer_inputs_kernel(address: Any) -> None:
    """Set x = scale * (of_tokens + the norm of x), of each layer by itself."""
    work = carray(address, 1)[0]
    scale = splat(work.scale)
    for unit in range(thread_id(), work.rows * work.layers, num_threads()):
        x, of_tokens = work.x + unit * work.columns * work.width, work.of_tokens + unit * work.columns * 4
        factor = _factor(work, x)
        for at in range(0, work.columns, LANES):
            numbers = multiply(numbers_at(x + at * work.width, work.width), factor)
            numbers = fma(numbers, load(work.weight + 4 * at, FLOAT32), load(of_tokens + 4 * at, FLOAT32))
            put_numbers(multiply(numbers, scale), x + at * work.width, work.width)


@subroutine
def _factor(work: Any, x: int) -> Any:
    """Return what a norm multiplies each number of a row by, before its weights."""
    squares = splat(np.float32(0))
    for at in range(0, work.columns, LANES):
        numbers = numbers_at(x + at * work.width, work.width)
        squares = fma(numbers, numbers, squares)
    return splat(np.float32(1) / np.sqrt(total(squares) / np.float32(work.columns) + work.epsilon))


CAP = record_of(
    "x",  # [rows, columns]
    "rows",
    "columns",
    "width",
    floats=("scale", "cap"),  # cap 0: none
)


@kernel(CAP)
def cap_kernel(address: Any) -> None:
    """Compute x = cap * tanh(scale * x / cap), or scale * x."""
    work = carray(address, 1)[0]
    count = work.rows * work.columns
    vectors = count // LANES
    for i in range(vectors * thread_id() // num_threads(), vectors * (thread_id() + 1) // num_threads()):
        at = work.x + i * LANES * work.width
        put_numbers(_capped(work, numbers_at(at, work.width)), at, work.width)
    if thread_id() == 0:
        for i in range(vectors * LANES, count):
            at = work.x + i * work.width
            put_number(at, largest(_capped(work, splat(number_at(at, work.width)))), work.width)


@subroutine
def _capped(work: Any, x: Any) -> Any:
    if work.cap == 0:
        return multiply(x, splat(work.scale))
    one = splat(np.float32(1))
    raised = exp(multiply(x, splat(np.float32(2) * work.scale / work.cap)))
    return multiply(splat(work.cap), fma(splat(np.float32(-2)), divide(one, add(raised, one)), one))
