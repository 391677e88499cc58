"""Activations, and the gate of an MLP: the activation of one half of its numbers times the other half.

Rows are independent: a row's result is the same bits whatever the other rows. Numbers are summed in float32 and rounded
once, when they are stored.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import carray

from engine.kernels.exponential import exp
from engine.kernels.records import record_of
from engine.kernels.simd import LANES, add, divide, fma, maximum, minimum, multiply, numbers_at, put_numbers, splat
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id


class Activation(IntEnum):
    """What a gate applies to `alpha` times its numbers. GELU: the approximation by tanh; ERF_GELU: the function.
    SQUARED_RELU: max(x, 0)^2. CLAMPED: SiLU over `alpha`, of gates and ups that are cut at `limit`, with 1 added to the
    ups. XIELU: x / 2 + above * max(x, 0)^2 + (1 / 2 + below) * (exp(y) - 1 - y), where y is min(x, 0).
    """

    SILU = 0
    GELU = 1
    CLAMPED = 2
    SQUARED_RELU = 3
    ERF_GELU = 4
    XIELU = 5


GATE = record_of(
    "gate",  # [rows, inner], rows `gate_stride` bytes apart
    "gate_stride",
    "up",  # [rows, inner], rows `up_stride` bytes apart; 0: ones
    "up_stride",
    "out",  # [rows, inner]
    "rows",
    "inner",
    "width",
    "activation",
    floats=("alpha", "limit", "above", "below"),
)

_GELU = np.float32(2 * (2 / np.pi) ** 0.5), np.float32(2 * (2 / np.pi) ** 0.5 * 0.044715)


@kernel(GATE)
def gate_kernel(address: Any) -> None:
    """Write out = act(gate) * up, where act(x) = x / (1 + exp(-y)): y is x for SiLU, _GELU[0] * x + _GELU[1] * x^3 for
    GELU, since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 * u)).
    """
    work = carray(address, 1)[0]
    one = splat(np.float32(1))
    for row in range(thread_id(), work.rows, num_threads()):
        gate, up = work.gate + row * work.gate_stride, work.up + row * work.up_stride
        out = work.out + row * work.inner * work.width
        for at in range(0, work.inner * work.width, LANES * work.width):
            x, factor = numbers_at(gate + at, work.width), one
            if work.up != 0:
                factor = numbers_at(up + at, work.width)
            if work.activation == Activation.CLAMPED:
                limit, lowest = splat(work.limit), splat(-work.limit)
                x, factor = minimum(x, limit), add(maximum(lowest, minimum(factor, limit)), one)
            else:
                x = multiply(x, splat(work.alpha))
            y = multiply(x, splat(-work.alpha if work.activation == Activation.CLAMPED else np.float32(-1)))
            if work.activation == Activation.GELU:
                y = multiply(y, fma(multiply(x, x), splat(_GELU[1]), splat(_GELU[0])))
            if work.activation == Activation.SQUARED_RELU:
                x = _squared_relu(x)
            elif work.activation == Activation.ERF_GELU:
                x = _erf_gelu(x)
            elif work.activation == Activation.XIELU:
                x = _xielu(work, x)
            else:
                x = divide(x, add(one, exp(y)))
            put_numbers(multiply(x, factor), out + at, work.width)


@subroutine
def _squared_relu(x: Any) -> Any:
    x = maximum(splat(np.float32(0)), x)
    return multiply(x, x)


_ERF_AT = np.float32(0.3275911)
_ERF = tuple(np.float32(x) for x in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
"""Abramowitz and Stegun, 7.1.26: where x is positive, 1 - erf(x) is this polynomial of t = 1 / (1 + _ERF_AT * x), times
t * exp(-x^2), with an error of 1.5e-7 at most."""
_HALF, _ROOT_HALF = np.float32(0.5), np.float32(0.5**0.5)


@subroutine
def _erf_gelu(x: Any) -> Any:
    """Return max(x, 0) - |x| * (1 - erf(|x| / sqrt(2))) / 2, which cancels nothing where x is negative."""
    size = maximum(x, multiply(x, splat(np.float32(-1))))
    u = multiply(size, splat(_ROOT_HALF))
    t = divide(splat(np.float32(1)), fma(u, splat(_ERF_AT), splat(np.float32(1))))
    sums = splat(np.float32(0))
    for i in range(5):
        sums = fma(sums, t, splat(_ERF[i]))
    rest = multiply(multiply(sums, t), exp(multiply(multiply(u, u), splat(np.float32(-1)))))
    return fma(multiply(size, splat(-_HALF)), rest, maximum(x, splat(np.float32(0))))


@subroutine
def _xielu(work: Any, x: Any) -> Any:
    zero, one = splat(np.float32(0)), splat(np.float32(1))
    positive, negative = maximum(x, zero), minimum(x, zero)
    bent = add(exp(negative), multiply(add(one, negative), splat(np.float32(-1))))
    made = fma(bent, splat(_HALF + work.below), multiply(x, splat(_HALF)))
    return fma(multiply(positive, positive), splat(work.above), made)
