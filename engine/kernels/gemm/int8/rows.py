"""Rows of x rounded to codes of 8 bits, in groups of 32 inputs, as `layout` describes.

A group's scale is a 127th of its largest amount, as float32. Its codes are x * (127 / largest), rounded to the nearest
whole number, to the even one between two. A group whose amounts are all below 1e-30 counts as zeros. A group with an
infinity or NaN gets a scale that makes every result of the row NaN.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import literally, njit, types
from numba.extending import intrinsic

from engine.kernels.amx import pointer
from engine.kernels.gemm.int8.layout import Int8Layout, rows_at_once
from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.simd import BFLOAT16, FLOAT, FLOAT32, INTS, LANES, constant, integers, read, spread

_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_TO_WHOLE = 1.5 * 2**23
"""Added to a small number, it leaves the nearest whole number in the lower bits."""
_LEAST = 1e-30


@njit
def round_rows(
    layout: int, most: int, x: int, width: int, rows: int, row_groups: int, place: int, part: int, parts: int
) -> None:
    """Round a part of the groups of x [rows, row_groups * 32], at `place`. layout: a number, compile-time constant;
    most: rows of a block; width: BFLOAT16 or FLOAT32.
    """
    layout = literally(layout)
    row = 0
    while row < rows:
        count = rows_at_once(rows - row, most)
        groups = count * row_groups
        for group in range(groups * part // parts, groups * (part + 1) // parts):
            source = x + ((row + group // row_groups) * row_groups + group % row_groups) * BLOCK_INPUTS * width
            index = row * row_groups + group % row_groups * count + group // row_groups
            goal = place + index * row_group_bytes(layout)
            if width == BFLOAT16:
                round_group(layout, BFLOAT16, source, goal)
            else:
                round_group(layout, FLOAT32, source, goal)
        row += count


@intrinsic(prefer_literal=True)
def row_group_bytes(context: Any, layout: Any) -> Any:
    """`Int8Layout.row_group_bytes` of the layout of that number."""
    size = Int8Layout.of_number(layout.literal_value).row_group_bytes
    return types.int64(layout), lambda context, builder, signature, args: _WORD(size)


@intrinsic(prefer_literal=True)
def round_group(context: Any, layout: Any, width: Any, source: Any, goal: Any) -> Any:
    """Round the 32 numbers at `source` to a group at `goal`. layout, width: compile-time constants."""
    of, size = Int8Layout.of_number(layout.literal_value), width.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, goal = args[2:]
        halves = [read(builder, builder.add(source, _WORD(i * LANES * size)), size) for i in range(2)]
        amounts = [builder.and_(builder.bitcast(half, INTS), integers(0x7FFFFFFF)) for half in halves]
        bits = _across(builder, _larger(builder, *amounts), _larger)  # as integers: NaN is larger than any number
        largest = builder.bitcast(bits, FLOAT)
        there = builder.fcmp_ordered(">", largest, FLOAT(_LEAST))
        inverse = builder.select(there, builder.fdiv(FLOAT(127.0), largest), FLOAT(0.0))
        scale = builder.fdiv(largest, FLOAT(127.0))
        sums = []
        for i, half in enumerate(halves):
            shifted = builder.fadd(builder.fmul(half, spread(builder, inverse)), constant(_TO_WHOLE))
            codes = builder.sub(builder.bitcast(shifted, INTS), _whole_bits(builder))
            kind = ir.VectorType(_BYTE, LANES)
            place = pointer(builder, builder.add(goal, _WORD(i * LANES)), kind)
            builder.store(builder.trunc(codes, kind), place, align=4)
            sums.append(_across(builder, codes, lambda builder, a, b: builder.add(a, b)))
        behind = builder.add(goal, _WORD(BLOCK_INPUTS))
        builder.store(scale, pointer(builder, behind, FLOAT), align=4)
        if not of.halves:
            sums = [builder.add(*sums)]
        for i, total in enumerate(sums):
            if of.offsets:
                given = builder.fmul(scale, builder.sitofp(total, FLOAT))
            else:
                given = builder.mul(total, _INT(-of.centre))
            builder.store(given, pointer(builder, builder.add(behind, _WORD(4 + 4 * i)), given.type), align=4)
        return context.get_dummy_value()

    return types.void(layout, width, types.int64, types.int64), generate


def _whole_bits(builder: ir.IRBuilder) -> ir.Value:
    return builder.bitcast(constant(_TO_WHOLE), INTS)


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _across(builder: ir.IRBuilder, x: ir.Value, join: Any) -> ir.Value:
    """All lanes joined, by halves."""
    step = LANES // 2
    while step:
        order = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
        x = join(builder, x, builder.shuffle_vector(x, x, order))
        step //= 2
    return builder.extract_element(x, _INT(0))
