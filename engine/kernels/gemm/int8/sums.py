"""The sums of a product with rows of 8 bits, for a block of rows and 16 outputs: see `layout`.

For each group, in order: the whole number sum(code * input), as float32, which it fits exactly, is multiplied with
(scale * row's scale), rounded once, and added to the row's sum with one rounding; then offset * (row's scale * sum of
inputs) is, with one rounding; if a step has two groups, after the products of both. So a row's sums are the same on all
instruction sets, and whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, fetch_line, fetch_panel_line, into_first_level, opaque
from engine.kernels.gemm.int8.dots import (
    InstructionSet,
    add_products,
    first_sums,
    looked_up,
    multiplied_codes,
    spread_word,
    whole_sums,
    words,
)
from engine.kernels.gemm.int8.layout import OFFSET_AT, ROW_GROUP_BYTES, SCALE_AT, SUMS_AT, VECTORS
from engine.kernels.gemm.matmul_sums import PANELS, row_counts
from engine.kernels.quant.layouts import LAYOUTS, QuantLayout
from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.quant.unpack import exponents, factor_bytes
from engine.kernels.simd import FLOAT, LANES, fused, pointer, same

_BYTE, _INT, _WORD = (ir.IntType(bits) for bits in (8, 32, 64))


def groups_ahead(rows: int) -> int:
    """Return by how many groups the codes of a matrix are prefetched ahead of a block of so many rows.

    A first level of cache holds little more than 8. Elsewhere, on two cores of Zen 4 that read 60 GB/s, 24 groups make
    forwards of two and four rows 1.6 and 1.4 times as fast, also by AVX2. From 16 rows on, which take longer for a
    group, so many make matrices of 900 inputs 1.06 times as slow, and 16 cost nothing.
    """
    if into_first_level():
        return 8
    return 24 if rows <= 4 else 16


@intrinsic(prefer_literal=True)
def sum_groups(
    context: Any,
    instructions: Any,
    layout: Any,
    fetches: Any,
    rows: Any,
    x: Any,
    tiles: Any,
    blocks: Any,
    scratch: Any,
    scratch_stride: Any,
) -> Any:
    """Write the products of a block of rows with 16 outputs to `scratch`: 16 float32 for each row, one row every
    `scratch_stride` bytes.

    instructions, layout, fetches: compile-time constants, the last 1 if codes are prefetched.
    rows: at most `InstructionSet.rows`. x: address of the rows' groups [groups, rows]. tiles: of the outputs' [blocks].
    """
    used, of = InstructionSet(instructions.literal_value), LAYOUTS[layout.literal_value]
    fetched = bool(fetches.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for count in row_counts(builder, args[3], used.rows):
            _Block(builder, used, of, fetched, count).sum(*args[4:])
        return context.get_dummy_value()

    return types.void(instructions, layout, fetches, *[types.int64] * 6), generate


class _Block:
    """Emits the sums of `count` rows and 16 outputs, in one vector or in two. Of two, the registers hold half a step's
    codes at a time.
    """

    def __init__(self, builder: ir.IRBuilder, used: InstructionSet, of: QuantLayout, fetches: bool, count: int):
        self.builder, self.used, self.of, self.count = builder, used, of, count
        self.firsts = range(0, LANES, used.lanes)
        self.spans = max(of.halves, len(self.firsts))
        self.ahead = groups_ahead(count) * of.tile_bytes // of.steps if fetches else 0
        self.offsets, self.values = of.offset is not None, of.values
        self.bits, self.bias = multiplied_codes(of, used)
        self.floats, self.ints = ir.VectorType(FLOAT, used.lanes), words(used.lanes)

    def sum(self, x: ir.Value, tiles: ir.Value, blocks: ir.Value, scratch: ir.Value, scratch_stride: ir.Value) -> None:
        """Write the products, as `sum_groups` says."""
        builder, of = self.builder, self.of
        sums = [[cgutils.alloca_once(builder, self.floats) for _ in self.firsts] for _ in range(self.count)]
        for cell in (cell for cells in sums for cell in cells):
            builder.store(same(self.floats, 0.0), cell)
        apart = builder.mul(blocks, _WORD(PANELS * of.tile_bytes))
        with cgutils.for_range(builder, blocks) as loop:
            tile = self._after(tiles, loop.index, of.tile_bytes)
            groups = self._after(x, loop.index, of.steps * self.count * ROW_GROUP_BYTES)
            numbers = [self._numbers(tile, first) for first in self.firsts]
            if of.steps == 1:
                self._add_group(sums, tile, _WORD(0), groups, numbers, apart)
            else:
                with cgutils.for_range(builder, _WORD(of.steps)) as inner:
                    here = self._after(groups, inner.index, self.count * ROW_GROUP_BYTES)
                    self._add_group(sums, tile, inner.index, here, numbers, apart)
        for row, cells in enumerate(sums):
            for first, cell in zip(self.firsts, cells, strict=True):
                place = builder.add(self._after(scratch, _WORD(row), scratch_stride), _WORD(4 * first))
                builder.store(builder.load(cell), pointer(builder, place, self.floats), align=4)

    def _add_group(
        self,
        sums: list[list[ir.Value]],
        tile: ir.Value,
        group: ir.Value,
        x: ir.Value,
        numbers: list[list[ir.Value]],
        apart: ir.Value,
    ) -> None:
        """Add a step's products. sums: by row and vector of outputs; numbers: the tile's scales and offsets, by vector.
        apart: how far the panels after next are.
        """
        builder, of = self.builder, self.of
        codes_at = opaque(builder, self._after(builder.add(tile, _WORD(of.codes_at)), group, of.code_bytes))
        if self.ahead:
            self._fetch(tile, group, apart)
        if of.factors is not None:
            numbers = [self._scaled(some, tile, group, at) for some, at in zip(numbers, self.firsts, strict=True)]
        x, found = opaque(builder, x), [list[ir.Value]()] * self.count
        for span in range(self.spans):
            codes = [self._codes(codes_at, first, span) for first in self.firsts]
            half, of_half = divmod(span * of.halves, self.spans)
            for row, cells in enumerate(sums):
                at = row * ROW_GROUP_BYTES
                some = found[row] if of_half else first_sums(self.used, self._starts(x, at, half))
                place = at + span * BLOCK_INPUTS // self.spans
                found[row] = add_products(builder, self.used, self.bits, codes, x, place, some)
                if of_half + of.halves == self.spans:
                    self._add_half(cells, found[row], numbers, x, at, half)

    def _fetch(self, tile: ir.Value, group: ir.Value, apart: ir.Value) -> None:
        """Prefetch what a later group reads, and a group of the panels after next, which are `apart` bytes further.

        A single row reads the codes in one stream, which a processor with AVX512 follows by itself, faster than it is
        told to: a forward then takes 0.9 of the time on two cores of Zen 4. It is told of the lines that begin the tile
        after next.
        """
        builder, of = self.builder, self.of
        if self.count == 1 and self.used is InstructionSet.AVX512_VNNI and not into_first_level():
            fetch_line(builder, builder.add(self._after(tile, group, LINE_BYTES), _WORD(2 * of.tile_bytes)))
            return
        share = opaque(builder, self._after(tile, group, of.tile_bytes // of.steps))
        later = opaque(builder, builder.add(share, apart))
        for line in range(0, of.tile_bytes // of.steps, LINE_BYTES):
            fetch_line(builder, builder.add(share, _WORD(self.ahead + line)))
            fetch_panel_line(builder, builder.add(later, _WORD(line)))

    def _add_half(
        self,
        cells: list[ir.Value],
        sums: list[ir.Value],
        numbers: list[list[ir.Value]],
        x: ir.Value,
        at: int,
        half: int,
    ) -> None:
        """Add the sums of a group, which may be half a step, to a row's cells. at: where the row's step begins, after
        x.
        """
        builder, of = self.builder, self.of
        wholes = whole_sums(builder, self.used, self.bits, sums, self._starts(x, at, half))
        scale = self._word(x, at + SCALE_AT, FLOAT)
        for cell, whole, of_outputs in zip(cells, wholes, numbers, strict=True):
            parts = [(builder.sitofp(whole, self.floats), builder.fmul(of_outputs[half], scale))]
            if half == of.halves - 1 and self.offsets:
                parts += zip(of_outputs[of.halves :], self._offsets(x, at, scale), strict=True)
            total = builder.load(cell)
            for pair in parts:
                total = fused(builder, *pair, total)
            builder.store(total, cell)

    def _starts(self, x: ir.Value, at: int, half: int) -> list[ir.Value]:
        """Return what a group's bias adds to the sums of codes and inputs, for each vector of outputs."""
        start = same(self.ints, 0)
        if self.bias:
            sums = self._word(x, at + SUMS_AT + 4 * (1 + half if self.of.halves == 2 else 0), _INT)
            start = self.builder.mul(sums, same(self.ints, self.bias))
        return [start] * len(self.firsts)

    def _offsets(self, x: ir.Value, at: int, scale: ir.Value) -> list[ir.Value]:
        """Return what an offset of 1 contributes to a row, for each group of its step."""
        builder, halves = self.builder, self.of.halves
        if halves == 1:
            return [self._word(x, at + OFFSET_AT, FLOAT)]
        sums = [builder.neg(self._word(x, at + SUMS_AT + 4 * (1 + half), _INT)) for half in range(halves)]
        return [builder.fmul(scale, builder.sitofp(some, self.floats)) for some in sums]

    def _word(self, x: ir.Value, place: int, kind: ir.Type) -> ir.Value:
        """Return a number of a row's step, in all lanes."""
        return spread_word(self.builder, self.builder.add(x, _WORD(place)), kind, self.used.lanes)

    def _after(self, address: ir.Value, index: ir.Value, size: int | ir.Value) -> ir.Value:
        """Return the address of an element of that size."""
        of_element = _WORD(size) if isinstance(size, int) else size
        return self.builder.add(address, self.builder.mul(index, of_element))

    def _numbers(self, tile: ir.Value, first: int) -> list[ir.Value]:
        """Return a tile's scales, and offsets if there are any, of the outputs from `first` on, as float32."""
        builder, of = self.builder, self.of
        numbers = [self._number(tile, i, first) for i in range(1 + self.offsets)]
        if of.unit != 1:
            numbers[0] = builder.fmul(numbers[0], same(self.floats, of.unit))
        if of.factors is not None and self.offsets:
            numbers[-1] = builder.fneg(numbers[-1])
        return numbers

    def _number(self, tile: ir.Value, index: int, first: int) -> ir.Value:
        """Return a tile's scales or offsets, as float32."""
        builder, lanes = self.builder, self.used.lanes
        if self.of.exponents:
            powers = exponents(builder, tile)
            return builder.shuffle_vector(powers, powers, ir.Constant(self.ints, [*range(first, first + lanes)]))
        address = builder.add(tile, _WORD(2 * (index * LANES + first)))
        halves = builder.load(pointer(builder, address, ir.VectorType(ir.HalfType(), lanes)), align=2)
        return builder.fpext(halves, self.floats)

    def _scaled(self, numbers: list[ir.Value], tile: ir.Value, group: ir.Value, first: int) -> list[ir.Value]:
        """Return the scales and offsets of a step's groups, kind by kind."""
        builder, of = self.builder, self.of
        factors = [self._factor(tile, group, i * LANES + first) for i in range(of.step_factors)]
        return [builder.fmul(numbers[i // of.halves], factor) for i, factor in enumerate(factors)]

    def _factor(self, tile: ir.Value, group: ir.Value, first: int) -> ir.Value:
        """Return a step's factors from `first` on, as float32."""
        builder, of, lanes = self.builder, self.of, self.used.lanes
        if of.factor_bits == 8:
            at = builder.add(tile, _WORD(of.factors_at + first))
            kind = ir.VectorType(_BYTE, lanes)
            stored = builder.load(pointer(builder, self._after(at, group, of.factor_bytes), kind), align=1)
        else:
            every = factor_bytes(builder, of, tile, group)
            stored = builder.shuffle_vector(every, every, ir.Constant(self.ints, [*range(first, first + lanes)]))
        numbers = builder.sub(builder.zext(stored, self.ints), same(self.ints, of.factor_bias))
        return builder.sitofp(numbers, self.floats)

    def _codes(self, address: ir.Value, first: int, span: int) -> list[ir.Value]:
        """Return a span's vectors of codes of the outputs from `first` on; those of 8 bits signed for AVX2."""
        codes = [self._code(address, first, i) for i in range(VECTORS)][span * VECTORS // self.spans :]
        codes = codes[: VECTORS // self.spans]
        return codes if self.values is None else looked_up(self.builder, self.used, self.bias, self.values, codes)

    def _code(self, address: ir.Value, first: int, i: int) -> ir.Value:
        """Return the `i`th of a step's eight vectors of codes."""
        builder, bits, ints = self.builder, self.of.bits, self.ints

        def vector(index: int) -> ir.Value:
            place = builder.add(address, _WORD(4 * (index * LANES + first)))
            return builder.load(pointer(builder, place, ints), align=4)

        def masked(x: ir.Value, mask: int) -> ir.Value:
            """Return these bits of every byte."""
            return builder.and_(x, same(ints, mask * 0x01010101))

        def up(x: ir.Value, by: int) -> ir.Value:
            return builder.shl(x, same(ints, by)) if by > 0 else builder.lshr(x, same(ints, -by)) if by else x

        if bits == 8:
            signs = same(ints, 0x80808080 - (1 << 32))
            return builder.xor(vector(i), signs) if self.used is InstructionSet.AVX2 else vector(i)
        if bits < 4:
            code = masked(up(vector(i % 2), -2 * (i // 2)), 3)
            return code if bits == 2 else builder.or_(code, masked(up(vector(2), 2 - i), 4))
        code = masked(up(vector(i % 4), -4 * (i // 4)), 15)
        if bits == 5:
            return builder.or_(code, masked(up(vector(4), 4 - i), 16))
        if bits == 6:
            return builder.or_(code, masked(up(vector(4 + i // 4), 4 - 2 * (i % 4)), 48))
        return code
