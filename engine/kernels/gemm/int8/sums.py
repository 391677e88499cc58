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

from engine.kernels.amx import LINE_BYTES, fetch_line, fetch_panel_line, opaque
from engine.kernels.gemm.int8.dots import InstructionSet, dot, looked_up, multiplied_codes, spread_word, words
from engine.kernels.gemm.int8.layout import OFFSET_AT, ROW_GROUP_BYTES, SCALE_AT, SUMS_AT, VECTORS
from engine.kernels.gemm.matmul_sums import PANELS, row_counts
from engine.kernels.quant.layouts import LAYOUTS, QuantLayout
from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.quant.unpack import exponents, factor_bytes
from engine.kernels.simd import FLOAT, LANES, fused, pointer, same

_BYTE, _INT, _WORD = (ir.IntType(bits) for bits in (8, 32, 64))
AHEAD = 8
"""Groups by which the codes of a matrix are prefetched ahead."""


@intrinsic(prefer_literal=True)
def sum_groups(
    context: Any,
    instructions: Any,
    layout: Any,
    ahead: Any,
    rows: Any,
    x: Any,
    tiles: Any,
    blocks: Any,
    scratch: Any,
    scratch_stride: Any,
) -> Any:
    """Write the products of a block of rows with 16 outputs to `scratch`: 16 float32 for each row, one row every
    `scratch_stride` bytes.

    instructions, layout, ahead: compile-time constants, the last how many groups ahead codes are prefetched, 0: none.
    rows: at most `InstructionSet.rows`. x: address of the rows' groups [groups, rows]. tiles: of the outputs' [blocks].
    """
    used, of = InstructionSet(instructions.literal_value), LAYOUTS[layout.literal_value]
    later = ahead.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with cgutils.for_range(builder, _WORD(LANES // used.lanes)) as loop:
            for count in row_counts(builder, args[3], used.rows):
                _Block(builder, used, of, later, count, loop.index).sum(*args[4:])
        return context.get_dummy_value()

    return types.void(instructions, layout, ahead, *[types.int64] * 6), generate


class _Block:
    """Emits the sums of `count` rows and the outputs of a vector, the `part`th of 16 outputs. One loop runs over the
    parts, since to compile each would take twice the time.
    """

    def __init__(
        self, builder: ir.IRBuilder, used: InstructionSet, of: QuantLayout, ahead: int, count: int, part: ir.Value
    ):
        self.builder, self.used, self.of, self.count = builder, used, of, count
        self.first = builder.mul(part, _WORD(used.lanes))
        self.ahead = ahead * of.tile_bytes // of.steps
        self.offsets, self.values = of.offset is not None, of.values
        self.bits, self.bias = multiplied_codes(of, used)
        self.floats, self.ints = ir.VectorType(FLOAT, used.lanes), words(used.lanes)

    def sum(self, x: ir.Value, tiles: ir.Value, blocks: ir.Value, scratch: ir.Value, scratch_stride: ir.Value) -> None:
        """Write the products, as `sum_groups` says."""
        builder, of = self.builder, self.of
        sums = [cgutils.alloca_once(builder, self.floats) for _ in range(self.count)]
        for cell in sums:
            builder.store(same(self.floats, 0.0), cell)
        apart = builder.mul(blocks, _WORD(PANELS * of.tile_bytes))
        with cgutils.for_range(builder, blocks) as loop:
            tile = self._after(tiles, loop.index, of.tile_bytes)
            groups = self._after(x, loop.index, of.steps * self.count * ROW_GROUP_BYTES)
            numbers = [self._number(tile, i) for i in range(1 + self.offsets)]
            if of.unit != 1:
                numbers[0] = builder.fmul(numbers[0], same(self.floats, of.unit))
            if of.factors is not None and self.offsets:
                numbers[-1] = builder.fneg(numbers[-1])
            if of.steps == 1:
                self._add_group(sums, tile, _WORD(0), groups, numbers, apart)
            else:
                with cgutils.for_range(builder, _WORD(of.steps)) as inner:
                    here = self._after(groups, inner.index, self.count * ROW_GROUP_BYTES)
                    self._add_group(sums, tile, inner.index, here, numbers, apart)
        for row, cell in enumerate(sums):
            place = self._after(self._after(scratch, _WORD(row), scratch_stride), self.first, 4)
            builder.store(builder.load(cell), pointer(builder, place, self.floats), align=4)

    def _add_group(
        self,
        sums: list[ir.Value],
        tile: ir.Value,
        group: ir.Value,
        x: ir.Value,
        numbers: list[ir.Value],
        apart: ir.Value,
    ) -> None:
        """Add a group's products. numbers: the tile's scales and offsets. apart: how far the panels after next are."""
        builder, of = self.builder, self.of
        codes_at = self._after(builder.add(tile, _WORD(of.codes_at)), group, of.code_bytes)
        codes_at = opaque(builder, self._after(codes_at, self.first, 4))
        share = opaque(builder, self._after(tile, group, of.tile_bytes // of.steps))
        later = opaque(builder, builder.add(share, apart))
        for line in range(0, of.tile_bytes // of.steps if self.ahead else 0, LINE_BYTES):
            fetch_line(builder, builder.add(share, _WORD(self.ahead + line)))
            fetch_panel_line(builder, builder.add(later, _WORD(line)))
        if of.factors is not None:
            factors = self._factors(tile, group)
            numbers = [builder.fmul(numbers[i // of.halves], factor) for i, factor in enumerate(factors)]
        codes = self._codes(codes_at)
        if self.values is not None:
            codes = looked_up(builder, self.used, self.bias, self.values, codes)
        x = opaque(builder, x)
        for row, cell in enumerate(sums):
            total = builder.load(cell)
            for pair in self._products(codes, numbers, x, row * ROW_GROUP_BYTES):
                total = fused(builder, *pair, total)
            builder.store(total, cell)

    def _products(
        self, codes: list[ir.Value], numbers: list[ir.Value], x: ir.Value, at: int
    ) -> list[tuple[ir.Value, ir.Value]]:
        """Return what a group adds to a row's sums, as pairs to be multiplied. at: where the row's group begins, after
        x.
        """
        builder, of, used = self.builder, self.of, self.used

        def word(place: int, kind: ir.Type) -> ir.Value:
            return spread_word(builder, builder.add(x, _WORD(at + place)), kind, used.lanes)

        scale, halves = word(SCALE_AT, FLOAT), of.halves
        parts = []
        for half in range(halves):
            some = codes[half * VECTORS // halves : (half + 1) * VECTORS // halves]
            start = same(self.ints, 0)
            if self.bias:
                sums = word(SUMS_AT + 4 * (1 + half if halves == 2 else 0), _INT)
                start = builder.mul(sums, same(self.ints, self.bias))
            whole = dot(builder, used, self.bits, some, x, at + half * BLOCK_INPUTS // 2, start)
            parts.append((builder.sitofp(whole, self.floats), builder.fmul(numbers[half], scale)))
        if self.offsets and halves == 1:
            parts.append((numbers[1], word(OFFSET_AT, FLOAT)))
        elif self.offsets:
            for half in range(halves):
                sums = builder.neg(word(SUMS_AT + 4 * (1 + half), _INT))
                parts.append((numbers[halves + half], builder.fmul(scale, builder.sitofp(sums, self.floats))))
        return parts

    def _after(self, address: ir.Value, index: ir.Value, size: int | ir.Value) -> ir.Value:
        """Return the address of an element of that size."""
        of_element = _WORD(size) if isinstance(size, int) else size
        return self.builder.add(address, self.builder.mul(index, of_element))

    def _number(self, tile: ir.Value, index: int) -> ir.Value:
        """Return a tile's scales or offsets, as float32."""
        builder = self.builder
        if self.of.exponents:
            return self._lanes(self._part_first(exponents(builder, tile)), 0)
        address = self._after(builder.add(tile, _WORD(2 * index * LANES)), self.first, 2)
        halves = builder.load(pointer(builder, address, ir.VectorType(ir.HalfType(), self.used.lanes)), align=2)
        return builder.fpext(halves, self.floats)

    def _factors(self, tile: ir.Value, group: ir.Value) -> list[ir.Value]:
        """Return a group's factors, kind by kind, as float32."""
        builder, of, kinds = self.builder, self.of, range(self.of.step_factors)
        if of.factor_bits == 8:
            at = self._after(builder.add(tile, _WORD(of.factors_at)), group, of.factor_bytes)
            bytes_, at = ir.VectorType(_BYTE, self.used.lanes), builder.add(at, self.first)
            places = [builder.add(at, _WORD(kind * LANES)) for kind in kinds]
            stored = [builder.load(pointer(builder, place, bytes_), align=1) for place in places]
        else:
            together = self._part_first(factor_bytes(builder, of, tile, group))
            stored = [self._lanes(together, kind * LANES) for kind in kinds]
        whole = [builder.sub(builder.zext(some, self.ints), same(self.ints, of.factor_bias)) for some in stored]
        return [builder.sitofp(some, self.floats) for some in whole]

    def _part_first(self, numbers: ir.Value) -> ir.Value:
        """Return numbers, 16 for all outputs, or several times 16, with those of this part first in each 16."""
        builder, lanes = self.builder, self.used.lanes
        if lanes == LANES:
            return numbers
        order = ir.Constant(words(numbers.type.count), [lane ^ lanes for lane in range(numbers.type.count)])
        second = builder.shuffle_vector(numbers, numbers, order)
        return builder.select(builder.icmp_unsigned("==", self.first, _WORD(0)), numbers, second)

    def _lanes(self, numbers: ir.Value, first: int) -> ir.Value:
        """Return as many of the numbers as a vector holds, from `first` on."""
        order = ir.Constant(self.ints, [*range(first, first + self.used.lanes)])
        return self.builder.shuffle_vector(numbers, numbers, order)

    def _codes(self, address: ir.Value) -> list[ir.Value]:
        """Return a step's eight vectors of codes; those of 8 bits as signed numbers for AVX2."""
        builder, bits = self.builder, self.of.bits

        def vector(index: int) -> ir.Value:
            place = builder.add(address, _WORD(4 * index * LANES))
            return builder.load(pointer(builder, place, self.ints), align=4)

        def masked(x: ir.Value, mask: int) -> ir.Value:
            """Return these bits of every byte."""
            return builder.and_(x, same(self.ints, mask * 0x01010101))

        def up(x: ir.Value, by: int) -> ir.Value:
            kind = self.ints
            return builder.shl(x, same(kind, by)) if by > 0 else builder.lshr(x, same(kind, -by)) if by else x

        if bits == 8:
            whole = [vector(i) for i in range(VECTORS)]
            signs = same(self.ints, 0x80808080 - (1 << 32))
            return [builder.xor(x, signs) for x in whole] if self.used is InstructionSet.AVX2 else whole
        if bits < 4:
            fours = [vector(i) for i in range(2)]
            codes = [masked(up(fours[i % 2], -2 * (i // 2)), 3) for i in range(VECTORS)]
            if bits == 3:
                plane = vector(2)
                codes = [builder.or_(x, masked(up(plane, 2 - i), 4)) for i, x in enumerate(codes)]
            return codes
        both = [vector(i) for i in range(VECTORS // 2)]
        codes = [masked(x, 15) for x in both] + [masked(up(x, -4), 15) for x in both]
        if bits == 5:
            plane = vector(4)
            codes = [builder.or_(x, masked(up(plane, 4 - i), 16)) for i, x in enumerate(codes)]
        if bits == 6:
            planes = [vector(4), vector(5)]
            codes = [builder.or_(x, masked(up(planes[i // 4], 4 - 2 * (i % 4)), 48)) for i, x in enumerate(codes)]
        return codes
