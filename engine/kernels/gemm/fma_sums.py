"""The sums of a product of bfloat16 rows with codes in words, for AVX2: see `engine.kernels.quant.layouts`.

A code is a small whole number, which float32 holds exactly wherever it lies in a word. So codes are multiplied as they
are, with inputs widened to float32. For each group of 16 inputs, or half of one of 32, sum(code * input) begins at
zero, or at -bias * the sum of the inputs; halves are added. Scale * that sum is added to the row's sum with one
rounding, and then offset * the sum of the group's inputs is. Weights are not rounded to bfloat16, and a row's sums are
the same whatever rows are beside it. Of few rows, each block makes floats of the codes in registers; of many, all share
those of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import literally, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import opaque
from engine.kernels.gemm.code_sums import fetch_codes, group_numbers, tile_numbers
from engine.kernels.gemm.matmul_sums import ROW_BYTES, row_counts
from engine.kernels.quant.layouts import LAYOUTS, STEP, QuantLayout
from engine.kernels.quant.words import code_bias, place_scales, word_floats
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT,
    FLOAT32,
    LANES,
    VECTOR,
    add,
    constant,
    features,
    fused,
    load,
    multiply,
    pointer,
    put_float,
    read,
    spread,
    store,
    total,
    vector,
    write,
)
from engine.kernels.subroutine import subroutine

_INT, _WORD = ir.IntType(32), ir.IntType(64)
_HALF = STEP // 2
CODE_ROWS = 8 if "+avx512f" in features() else 4
"""Rows whose sums with one panel fit into the vector registers."""
STEP_BYTES = STEP * FLOAT32
"""Bytes of a step of a widened row."""


def totals_of_step(layout: QuantLayout) -> int:
    """Return how many sums of inputs a step of a row has: of its halves, of the whole, or none. No layout has both a
    bias and offsets.
    """
    return 2 if code_bias(layout) else 0 if layout.offset is None else layout.halves


@subroutine
def widen_rows(
    layout: int, totals_of: int, bias: int, source: int, rows: int, inputs: int, x: int, totals: int
) -> None:
    """Write rows of bfloat16 to x [steps, rows, 32], times `place_scales`, and the sums of their groups' inputs, times
    -bias if there is one, to `totals` [steps, rows, totals_of]. layout: its number, a compile-time constant.
    """
    layout, factor = literally(layout), np.float32(-bias if bias else 1)
    for row in range(rows):
        for step in range(inputs // STEP):
            at, place = source + (row * inputs + step * STEP) * BFLOAT16, step * rows + row
            low, high = load(at, BFLOAT16), load(at + LANES * BFLOAT16, BFLOAT16)
            goal, sums = x + place * STEP_BYTES, totals + place * totals_of * FLOAT32
            store(multiply(low, _place_scales(layout, 0)), goal, FLOAT32)
            store(multiply(high, _place_scales(layout, 1)), goal + LANES * FLOAT32, FLOAT32)
            if totals_of == 2:
                put_float(sums, total(low) * factor)
                put_float(sums + FLOAT32, total(high) * factor)
            elif totals_of == 1:
                put_float(sums, total(add(low, high)))


@intrinsic(prefer_literal=True)
def _place_scales(context: Any, layout: Any, half: Any) -> Any:
    first = half.literal_value * LANES
    scales = place_scales(LAYOUTS[layout.literal_value])[first : first + LANES]
    return vector(layout, half), lambda context, builder, signature, args: ir.Constant(VECTOR, scales)


@intrinsic(prefer_literal=True)
def sum_fused_codes(
    context: Any,
    layout: Any,
    shared: Any,
    rows: Any,
    x: Any,
    totals: Any,
    weights: Any,
    steps: Any,
    sums: Any,
    place: Any,
) -> Any:
    """Write the products of rows with a panel to `sums`: 16 float32 each, one row every ROW_BYTES bytes.

    layout, shared: compile-time constants, the second whether the codes of a step become floats once, at `place`. x,
    totals: as `widen_rows` writes them. weights: address of the panel.
    """
    of, once = LAYOUTS[layout.literal_value], bool(shared.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Panel(builder, of, once, *args[2:]).sum()
        return context.get_dummy_value()

    return types.void(layout, shared, *[types.int64] * 7), generate


class _Panel:
    """Emits the sums of rows with a panel. Arguments are as for `sum_fused_codes`."""

    def __init__(self, builder: ir.IRBuilder, of: QuantLayout, shared: bool, *args: ir.Value):
        self.builder, self.of, self.shared = builder, of, shared
        self.rows, self.x, self.totals, self.weights, self.steps, self.sums, self.place = args

    def sum(self) -> None:
        builder, of = self.builder, self.of
        with cgutils.for_range(builder, self.rows) as loop:
            write(builder, constant(0.0), self._after(self.sums, loop.index, ROW_BYTES), FLOAT32)
        with cgutils.for_range(builder, builder.udiv(self.steps, _WORD(of.steps))) as loop:
            tile = self._after(self.weights, loop.index, of.tile_bytes)
            head = tile_numbers(builder, of, tile)
            head[0] = builder.fmul(head[0], constant(of.unit))
            with cgutils.for_range(builder, _WORD(of.steps)) as inner:
                step = builder.add(builder.mul(loop.index, _WORD(of.steps)), inner.index)
                self._add_step(tile, head, inner.index, builder.mul(step, self.rows))

    def _add_step(self, tile: ir.Value, head: list[ir.Value], inside: ir.Value, first: ir.Value) -> None:
        """Add the products of a step. inside: its number in its tile. first: of its first row in x."""
        builder, of = self.builder, self.of
        fetch_codes(builder, of, tile, inside)
        numbers = group_numbers(builder, of, tile, head, inside)
        codes = opaque(builder, self._after(builder.add(tile, _WORD(of.codes_at)), inside, of.code_bytes))
        if self.shared:
            code = word_floats(builder, of, codes)
            for i in range(STEP):
                write(builder, code(i), builder.add(self.place, _WORD(i * LANES * FLOAT32)), FLOAT32)
        blocks = builder.udiv(builder.add(self.rows, _WORD(CODE_ROWS - 1)), _WORD(CODE_ROWS))
        with cgutils.for_range(builder, blocks) as loop:
            row = builder.mul(loop.index, _WORD(CODE_ROWS))
            left, place = builder.sub(self.rows, row), builder.add(first, row)
            x = opaque(builder, self._after(self.x, place, STEP_BYTES))
            totals = self._after(self.totals, place, totals_of_step(of) * FLOAT32)
            sums = self._after(self.sums, row, ROW_BYTES)
            for count in row_counts(builder, left, CODE_ROWS):
                self._add_rows(count, codes, numbers, x, totals, sums)

    def _add_rows(
        self, count: int, codes: ir.Value, numbers: list[ir.Value], x: ir.Value, totals: ir.Value, sums: ir.Value
    ) -> None:
        """Add the products of `count` rows. numbers: the step's scales and offsets."""
        builder, of, kinds = self.builder, self.of, totals_of_step(self.of)
        code = word_floats(builder, of, codes)

        def number(index: int) -> ir.Value:
            if self.shared:
                return read(builder, builder.add(self.place, _WORD(index * LANES * FLOAT32)), FLOAT32)
            return code(index)

        def spread_at(address: ir.Value, at: int) -> ir.Value:
            number = builder.load(pointer(builder, builder.add(address, _WORD(at)), FLOAT), align=4)
            return spread(builder, number)

        def total_of(row: int, which: int) -> ir.Value:
            return spread_at(totals, (row * kinds + which) * FLOAT32)

        halves: list[list[ir.Value | None]] = [
            [total_of(row, half) if code_bias(of) else None for row in range(count)] for half in range(2)
        ]
        order = [half * _HALF + i for i in range(_HALF) for half in range(2)]
        for index in order if 2 * count <= CODE_ROWS else range(STEP):
            value, products = number(index), halves[index // _HALF]
            for row, product in enumerate(products):
                one = spread_at(x, row * STEP_BYTES + index * FLOAT32)
                products[row] = builder.fmul(value, one) if product is None else fused(builder, value, one, product)
        for row in range(count):
            place = builder.add(sums, _WORD(row * ROW_BYTES))
            found = read(builder, place, FLOAT32)
            products = [half[row] for half in halves]
            if of.halves == 1:
                products = [builder.fadd(*products)]
            for product, scale in zip(products, numbers, strict=False):
                found = fused(builder, product, scale, found)
            for group in range(0 if of.offset is None else of.halves):
                found = fused(builder, numbers[of.halves + group], total_of(row, group), found)
            write(builder, found, place, FLOAT32)

    def _after(self, address: ir.Value, index: ir.Value, size: int) -> ir.Value:
        """Return the address of an element of that size."""
        return self.builder.add(address, self.builder.mul(index, _WORD(size)))
