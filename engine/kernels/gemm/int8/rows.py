"""Rounds rows of x to codes of 8 bits, in groups of 32 inputs, as `layout` describes.

A group's scale is a 127th of its largest amount, as float32. Its codes are x * (127 / largest), rounded to the nearest
whole number, to the even one between two. A group whose amounts are all below 1e-30 counts as zeros. A group with an
infinity or NaN gets a scale that makes every result of the row NaN.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.gemm.int8.layout import OFFSET_AT, ROW_GROUP_BYTES, SCALE_AT, SUMS_AT, rows_at_once
from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.simd import BFLOAT16, FLOAT, FLOAT32, INTS, LANES, constant, integers, pointer, read, spread
from engine.kernels.subroutine import subroutine

_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_TO_WHOLE = 1.5 * 2**23
"""Added to a small number, this leaves the nearest whole number in the lower bits."""
_LEAST = 1e-30


@subroutine
def round_rows(most: int, x: int, width: int, rows: int, row_groups: int, place: int, part: int, parts: int) -> None:
    """Round a part of the groups of x [rows, row_groups * 32], at `place`. most: rows of a block; width: BFLOAT16 or
    FLOAT32.
    """
    row = 0
    while row < rows:
        count = rows_at_once(rows - row, most)
        groups = count * row_groups
        for group in range(groups * part // parts, groups * (part + 1) // parts):
            source = x + ((row + group // row_groups) * row_groups + group % row_groups) * BLOCK_INPUTS * width
            index = row * row_groups + group % row_groups * count + group // row_groups
            if width == BFLOAT16:
                round_group(BFLOAT16, source, place + index * ROW_GROUP_BYTES)
            else:
                round_group(FLOAT32, source, place + index * ROW_GROUP_BYTES)
        row += count


@intrinsic(prefer_literal=True)
def round_group(context: Any, width: Any, source: Any, goal: Any) -> Any:
    """Round the 32 numbers at `source` to a group at `goal`. width: a compile-time constant."""
    size = width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, goal = args[1:]

        def put(value: ir.Value, at: int) -> None:
            builder.store(value, pointer(builder, builder.add(goal, _WORD(at)), value.type), align=4)

        halves = [read(builder, builder.add(source, _WORD(i * LANES * size)), size) for i in range(2)]
        amounts = [builder.and_(builder.bitcast(half, INTS), integers(0x7FFFFFFF)) for half in halves]
        # compared as integers: NaN is larger than any number
        bits = _across(builder, _larger(builder, *amounts), _larger)
        largest = builder.bitcast(bits, FLOAT)
        there = builder.fcmp_ordered(">", largest, FLOAT(_LEAST))
        inverse = builder.select(there, builder.fdiv(FLOAT(127.0), largest), FLOAT(0.0))
        finite = builder.fcmp_ordered("<", largest, FLOAT(float("inf")))
        scale, sums = builder.select(finite, builder.fdiv(largest, FLOAT(127.0)), FLOAT(float("nan"))), []
        for i, half in enumerate(halves):
            shifted = builder.fadd(builder.fmul(half, spread(builder, inverse)), constant(_TO_WHOLE))
            codes = builder.sub(builder.bitcast(shifted, INTS), _whole_bits(builder))
            put(builder.trunc(codes, ir.VectorType(_BYTE, LANES)), i * LANES)
            sums.append(_across(builder, codes, lambda builder, a, b: builder.add(a, b)))
        total = builder.add(*sums)
        put(scale, SCALE_AT)
        put(builder.fmul(scale, builder.sitofp(total, FLOAT)), OFFSET_AT)
        for i, some in enumerate([total, *sums]):
            put(builder.neg(some), SUMS_AT + 4 * i)
        return context.get_dummy_value()

    return types.void(width, types.int64, types.int64), generate


def _whole_bits(builder: ir.IRBuilder) -> ir.Value:
    return builder.bitcast(constant(_TO_WHOLE), INTS)


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _across(builder: ir.IRBuilder, x: ir.Value, join: Any) -> ir.Value:
    """Join all lanes, by halves."""
    step = LANES // 2
    while step:
        order = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
        x = join(builder, x, builder.shuffle_vector(x, x, order))
        step //= 2
    return builder.extract_element(x, _INT(0))
