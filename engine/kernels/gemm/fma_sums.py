"""The sums of a product of bfloat16 rows with codes in words, for AVX2: see `engine.kernels.quant.layouts`.

A code is a small whole number, which float32 holds exactly wherever it lies in a word. So codes are multiplied as they
are, with inputs widened to float32. For each group of 16 inputs, or half a group of 32, sum(code * input) begins at
zero, or at -bias * the sum of the inputs; scale * that sum is added to the row's sum with one rounding, and then offset
* the sum of a group's inputs is. Weights are not rounded to bfloat16, and a row's sums are the same whatever rows are
beside it. Of few rows, each block makes floats of the codes in registers; of many, all share those of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import literally, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, opaque
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

_INT, _WORD = ir.IntType(32), ir.IntType(64)
_HALF = STEP // 2
CODE_ROWS = 8 if "+avx512f" in features() else 4
"""Rows whose sums with one panel fit into the vector registers."""
STEP_BYTES = STEP * FLOAT32
"""Bytes of a step of a widened row."""


def totals_of_step(layout: QuantLayout) -> int:
    """Return how many sums of inputs a step of a row has: of its halves, of the whole, or none."""
    return 2 if code_bias(layout) else 0 if layout.offset is None else layout.halves


@njit
def widen_rows(layout: int, totals_of: int, bias: int, source: int, rows: int, inputs: int, x: int, totals: int) -> None:
    """Write rows of bfloat16 to x [steps, rows, 32], as `word_floats` wants them, and the sums of their groups' inputs,
    times -bias if there is one, to `totals` [steps, rows, totals_of]. layout, totals_of: compile-time constants.
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
    most: Any,
    panels: Any,
    shared: Any,
    rows: Any,
    x: Any,
    totals: Any,
    weights: Any,
    panel_bytes: Any,
    steps: Any,
    sums: Any,
    place: Any,
) -> Any:
    """Write the products of rows with `panels` panels to `sums`, [rows, 2 * 16] float32.

    layout, most, panels, shared: compile-time constants. most: rows multiplied at a time. shared: whether the codes of
    a step become floats once, at `place`. x, totals: as `widen_rows` writes them. weights: address of the first panel,
    one every `panel_bytes`.
    """
    of, at_once, width, once = LAYOUTS[layout.literal_value], most.literal_value, panels.literal_value, shared.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Panels(builder, of, at_once, width, once == 1, *args[4:]).sum()
        return context.get_dummy_value()

    return types.void(layout, most, panels, shared, *[types.int64] * 8), generate


class _Panels:
    """Emits the sums of rows with some panels. Arguments are as for `sum_fused_codes`."""

    def __init__(self, builder: ir.IRBuilder, of: QuantLayout, most: int, width: int, shared: bool, *args: ir.Value):
        self.builder, self.of, self.most, self.shared = builder, of, most, shared
        self.rows, self.x, self.totals, weights, panel_bytes, self.steps, self.sums, self.place = args
        self.panels = [builder.add(weights, builder.mul(panel_bytes, _WORD(i))) for i in range(width)]

    def sum(self) -> None:
        builder, of = self.builder, self.of
        with cgutils.for_range(builder, self.rows) as loop:
            for panel in range(len(self.panels)):
                write(builder, constant(0.0), self._after(self.sums, loop.index, ROW_BYTES, panel * LINE_BYTES), FLOAT32)
        with cgutils.for_range(builder, builder.udiv(self.steps, _WORD(of.steps))) as loop:
            tiles = [self._after(panel, loop.index, of.tile_bytes) for panel in self.panels]
            heads = [tile_numbers(builder, of, tile) for tile in tiles]
            for head in heads:
                head[0] = builder.fmul(head[0], constant(of.unit))
            with cgutils.for_range(builder, _WORD(of.steps)) as inner:
                step = builder.add(builder.mul(loop.index, _WORD(of.steps)), inner.index)
                self._add_step(tiles, heads, inner.index, builder.mul(step, self.rows))

    def _add_step(
        self, tiles: list[ir.Value], heads: list[list[ir.Value]], inside: ir.Value, first: ir.Value
    ) -> None:
        """Add the products of a step. inside: its number in its tile. first: of its first row in x."""
        builder, of = self.builder, self.of
        for tile in tiles:
            fetch_codes(builder, of, tile, inside)
        numbers = [group_numbers(builder, of, tile, head, inside) for tile, head in zip(tiles, heads, strict=True)]
        codes = [opaque(builder, self._after(tile, inside, of.code_bytes, of.codes_at)) for tile in tiles]
        if self.shared:
            code = word_floats(builder, of, codes[0])
            for i in range(STEP):
                write(builder, code(i), builder.add(self.place, _WORD(i * LINE_BYTES)), FLOAT32)
        blocks = builder.udiv(builder.add(self.rows, _WORD(self.most - 1)), _WORD(self.most))
        with cgutils.for_range(builder, blocks) as loop:
            row = builder.mul(loop.index, _WORD(self.most))
            left, place = builder.sub(self.rows, row), builder.add(first, row)
            x = opaque(builder, self._after(self.x, place, STEP_BYTES))
            totals = self._after(self.totals, place, totals_of_step(of) * FLOAT32)
            sums = self._after(self.sums, row, ROW_BYTES)
            for count in row_counts(builder, left, self.most):
                self._add_rows(count, codes, numbers, x, totals, sums)

    def _add_rows(
        self,
        count: int,
        codes: list[ir.Value],
        numbers: list[list[ir.Value]],
        x: ir.Value,
        totals: ir.Value,
        sums: ir.Value,
    ) -> None:
        """Add the products of `count` rows. numbers: the step's scales and offsets, of each panel."""
        builder, of, kinds = self.builder, self.of, totals_of_step(self.of)
        makers = [word_floats(builder, of, address) for address in codes]

        def values(index: int) -> list[ir.Value]:
            if self.shared:
                return [read(builder, builder.add(self.place, _WORD(index * LINE_BYTES)), FLOAT32)]
            return [number(index) for number in makers]

        def spread_at(address: ir.Value, at: int) -> ir.Value:
            return spread(builder, builder.load(pointer(builder, builder.add(address, _WORD(at)), FLOAT), align=4))

        def total_of(row: int, which: int) -> ir.Value:
            return spread_at(totals, (row * kinds + which) * FLOAT32)

        panels = range(len(codes))
        products = {
            (half, row, panel): total_of(row, half) if code_bias(of) else None
            for half in range(2)
            for row in range(count)
            for panel in panels
        }
        alternating = [half * _HALF + i for i in range(_HALF) for half in range(2)]
        for index in alternating if 2 * count * len(codes) <= CODE_ROWS else range(STEP):
            weights = values(index)
            for row in range(count):
                one = spread_at(x, row * STEP_BYTES + index * FLOAT32)
                for panel, value in enumerate(weights):
                    key = index // _HALF, row, panel
                    before = products[key]
                    products[key] = builder.fmul(value, one) if before is None else fused(builder, value, one, before)
        for row in range(count):
            for panel, of_panel in enumerate(numbers):
                place = builder.add(sums, _WORD(row * ROW_BYTES + panel * LINE_BYTES))
                found = read(builder, place, FLOAT32)
                for half in range(2):
                    found = fused(builder, products[half, row, panel], of_panel[half * of.halves // 2], found)
                for group in range(0 if of.offset is None else of.halves):
                    found = fused(builder, of_panel[of.halves + group], total_of(row, group), found)
                write(builder, found, place, FLOAT32)

    def _after(self, address: ir.Value, index: ir.Value, size: int, by: int = 0) -> ir.Value:
        """Return the address of an element of that size, and `by` bytes further."""
        return self.builder.add(self.builder.add(address, self.builder.mul(index, _WORD(size))), _WORD(by))
