"""Powers of e and of two, elementwise on vectors, for numba kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from engine.kernels.simd import INTS, VECTOR, add, constant, divide, fused, integers, multiply, splat, vector
from engine.kernels.subroutine import subroutine


def power_of_two(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return 2 ** x for x <= 0, within two units in the last place; 0 from -127 down, minus infinity included."""
    low, magic = constant(-127.0), constant(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    rounded = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(rounded, magic))
    p = constant(1.535336188319500e-4)
    for coefficient in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1):
        p = fused(builder, p, r, constant(coefficient))
    p = fused(builder, fused(builder, p, r, constant(6.931472028550421e-1)), r, constant(1.0))
    power = builder.shl(builder.bitcast(rounded, INTS), integers(23))  # the integer, shifted into the exponent
    return builder.bitcast(builder.add(builder.bitcast(p, INTS), power), VECTOR)


def exponential(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return exp(x), within two units in the last place for x <= 88; 0 below -87, minus infinity included."""
    compare = builder.fcmp_ordered
    log2_e, magic = constant(math.log2(math.e)), constant(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    low, high = constant(-87.0), constant(88.0)
    tiny = compare("<", x, low)
    x = builder.select(tiny, low, x)
    x = builder.select(compare(">", x, high), high, x)
    n = builder.fsub(builder.fadd(builder.fmul(x, log2_e), magic), magic)
    r = fused(builder, n, constant(-0.693359375), x)
    r = fused(builder, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fused(builder, p, r, constant(coefficient))
    p = builder.fadd(fused(builder, p, builder.fmul(r, r), r), constant(1.0))
    power = builder.shl(builder.add(builder.fptosi(n, INTS), integers(127)), integers(23))
    return builder.select(tiny, constant(0.0), builder.fmul(p, builder.bitcast(power, VECTOR)))


@intrinsic(prefer_literal=True)
def exp(context: Any, x: Any) -> Any:
    """Return exp(x)."""
    return vector(vector), lambda context, builder, signature, args: exponential(builder, args[0])


@intrinsic(prefer_literal=True)
def exp2(context: Any, x: Any) -> Any:
    """Return 2 ** x, for x <= 0."""
    return vector(vector), lambda context, builder, signature, args: power_of_two(builder, args[0])


@subroutine
def silu(x: Any) -> Any:
    """Return x / (1 + exp(-x))."""
    return divide(x, add(splat(np.float32(1)), exp(multiply(x, splat(np.float32(-1))))))
