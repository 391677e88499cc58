"""The sums of a product of bfloat16 rows with codes in words, for AVX512-BF16: see `engine.kernels.quant.layouts`.

A code is a small whole number, which bfloat16 holds exactly, and one instruction looks up 32 of them. So codes are
multiplied as they are. For each group of 32 inputs, or of 16, sum(code * input) begins at zero; scale * that sum is
added to the row's sum with one rounding, and then offset * the sum of the group's inputs is. Weights are not rounded to
bfloat16, and a row's sums are the same whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import literally, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, fetch_line
from engine.kernels.gemm.matmul_sums import PANELS, SUMS, dot, row_counts, row_starts, sums_in_registers
from engine.kernels.quant.layouts import LAYOUTS, STEP, QuantLayout
from engine.kernels.quant.unpack import exponents, factor_bytes, half_floats
from engine.kernels.quant.words import word_pairs
from engine.kernels.simd import BFLOAT16, FLOAT, LANES, fused, pointer, put_float, read
from engine.kernels.subroutine import subroutine

_INT, _WORD = ir.IntType(32), ir.IntType(64)
_PAIR, _INTS = ir.VectorType(_INT, LANES), ir.VectorType(_INT, LANES)
_PAIRS = STEP // 2
_AHEAD = 64  # groups by which codes are prefetched ahead: mostly those of the second panel and of the next two


@intrinsic(prefer_literal=True)
def sum_codes(
    context: Any,
    layout: Any,
    most: Any,
    rows: Any,
    x: Any,
    stride: Any,
    totals: Any,
    weights: Any,
    panel_bytes: Any,
    steps: Any,
    scratch: Any,
    scratch_stride: Any,
) -> Any:
    """Write products of `rows` rows, at most `most`, with two panels to `scratch`: [rows, 2 * 16] float32, one row
    every `scratch_stride` bytes.

    layout, most: compile-time constants, the first a layout's number. x: address of the first row, one every `stride`
    bytes. totals: [rows, groups] float32, the sums of each group's inputs. weights: address of the first panel; the
    second is `panel_bytes` further.
    """
    of = LAYOUTS[layout.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, rest = args[2], args[3:]
        for count in row_counts(builder, rows, most.literal_value):
            _Block(builder, of, count, *rest).sum()
        return context.get_dummy_value()

    return types.void(layout, most, *[types.int64] * 9), generate


def _unpacked(builder: ir.IRBuilder, of: QuantLayout, tiles: list[ir.Value], step: ir.Value) -> Iterator[Any]:
    """Yield, for each pair of a step, the codes of all panels."""
    at = [builder.add(tile, builder.add(_WORD(of.codes_at), builder.mul(step, _WORD(of.code_bytes)))) for tile in tiles]
    return zip(*(word_pairs(builder, of, address) for address in at), strict=True)


class _Block:
    """Emits the sums of `count` rows with two panels. Arguments are as for `sum_codes`."""

    def __init__(self, builder: ir.IRBuilder, of: QuantLayout, count: int, *args: ir.Value):
        self.builder, self.of, self.count = builder, of, count
        self.x, self.stride, self.totals, weights, panel_bytes, self.steps, self.scratch, self.scratch_stride = args
        self.panels = [weights, builder.add(weights, panel_bytes)]

    def sum(self) -> None:
        builder, of = self.builder, self.of
        with (
            sums_in_registers(builder, self.count, PANELS, self.x, self.stride, self.scratch, self.scratch_stride) as (
                starts,
                sums,
            ),
            cgutils.for_range(builder, builder.udiv(self.steps, _WORD(of.steps))) as loop,
        ):
            offset = builder.mul(loop.index, _WORD(of.tile_bytes))
            tiles = [builder.add(panel, offset) for panel in self.panels]
            heads = [tile_numbers(builder, of, tile) for tile in tiles]
            first = builder.mul(loop.index, _WORD(of.steps))
            if of.steps == 1:
                self._add_group(starts, sums, tiles, heads, _WORD(0), first)
            else:
                with cgutils.for_range(builder, _WORD(of.steps)) as inner:
                    self._add_group(starts, sums, tiles, heads, inner.index, builder.add(first, inner.index))

    def _add_group(
        self,
        starts: list[ir.Value],
        sums: list[list[ir.Value]],
        tiles: list[ir.Value],
        heads: list[list[ir.Value]],
        inside: ir.Value,
        step: ir.Value,
    ) -> None:
        """Add a group's products. inside: its number in its tile; step: in the row."""
        builder, of = self.builder, self.of
        for tile in tiles:
            fetch_codes(builder, of, tile, inside)
        numbers = [group_numbers(builder, of, tile, head, inside) for tile, head in zip(tiles, heads, strict=True)]
        here = [builder.add(start, builder.mul(step, _WORD(2 * STEP))) for start in starts]
        matrices = _unpacked(builder, of, tiles, inside)
        halves = of.halves
        none = [[ir.Constant(SUMS, [0.0] * LANES)] * PANELS for _ in range(self.count)]
        products = none
        for pair, matrix in enumerate(matrices):
            products = [dot(builder, some, matrix, at, pair) for some, at in zip(products, here, strict=True)]
            if (pair + 1) % (_PAIRS // halves) == 0:
                self._add_scaled(sums, products, [scales[pair * halves // _PAIRS] for scales in numbers])
                products = none
        if of.offset is not None:
            for half in range(halves):
                group = builder.add(builder.mul(step, _WORD(halves)), _WORD(half))
                self._add_offsets(sums, [scales[halves + half] for scales in numbers], group)

    def _add_scaled(self, sums: list[list[ir.Value]], products: list[Any], scales: list[ir.Value]) -> None:
        builder = self.builder
        for cells, some in zip(sums, products, strict=True):
            for cell, product, scale in zip(cells, some, scales, strict=True):
                builder.store(fused(builder, product, scale, builder.load(cell)), cell)

    def _add_offsets(self, sums: list[list[ir.Value]], offsets: list[ir.Value], group: ir.Value) -> None:
        builder = self.builder
        row_bytes = builder.mul(self.steps, _WORD(4 * self.of.halves))
        for cells, totals in zip(sums, row_starts(builder, self.count, self.totals, row_bytes), strict=True):
            total = _spread(builder, builder.add(totals, builder.mul(group, _WORD(4))))
            for cell, offset in zip(cells, offsets, strict=True):
                builder.store(fused(builder, offset, total, builder.load(cell)), cell)


def tile_numbers(builder: ir.IRBuilder, of: QuantLayout, tile: ir.Value) -> list[ir.Value]:
    """Return a tile's scales and, if it has any, offsets, with the sign that they are added with."""
    numbers = [exponents(builder, tile) if of.exponents else half_floats(builder, tile)]
    if of.offset is not None:
        offsets = half_floats(builder, builder.add(tile, _WORD(2 * LANES)))
        numbers.append(offsets if of.factors is None else builder.fneg(offsets))
    return numbers


def group_numbers(
    builder: ir.IRBuilder, of: QuantLayout, tile: ir.Value, head: list[ir.Value], inside: ir.Value
) -> list[ir.Value]:
    """Return the scale of a group or the scales of its halves, and then the same of its offsets. head: the tile's
    numbers. inside: the group's number in its tile.
    """
    if of.factors is None:
        return head
    stored, found = factor_bytes(builder, of, tile, inside), []
    for i in range(of.step_factors):
        order = ir.Constant(_INTS, [i * LANES + lane for lane in range(LANES)])
        some = builder.zext(builder.shuffle_vector(stored, stored, order), _INTS)
        factor = builder.sub(some, ir.Constant(_INTS, [of.factor_bias] * LANES))
        found.append(builder.fmul(builder.sitofp(factor, SUMS), head[i // of.halves]))
    return found


def fetch_codes(builder: ir.IRBuilder, of: QuantLayout, tile: ir.Value, inside: ir.Value) -> None:
    """Prefetch codes some groups ahead."""
    share = of.tile_bytes // of.steps
    at = builder.add(tile, builder.add(builder.mul(inside, _WORD(share)), _WORD(_AHEAD * share)))
    for line in range(0, share, LINE_BYTES):
        fetch_line(builder, builder.add(at, _WORD(line)))


@subroutine
def put_totals(size: int, x: int, rows: int, groups: int, place: int, part: int, parts: int) -> None:
    """Write a part of the sums of the groups' inputs of x [rows, groups * size] bfloat16 to `place`: [rows, groups]
    float32. size: 16 or 32, a compile-time constant.
    """
    size = literally(size)
    for i in range(rows * groups * part // parts, rows * groups * (part + 1) // parts):
        put_float(place + 4 * i, _group_total(size, x + i * size * 2))


@intrinsic(prefer_literal=True)
def _group_total(context: Any, size: Any, address: Any) -> Any:
    """Return the sum of the `size` bfloat16 numbers there, as float32."""
    count = size.literal_value // LANES

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = [read(builder, builder.add(args[1], _WORD(i * 2 * LANES)), BFLOAT16) for i in range(count)]
        total, step = builder.fadd(*parts) if count == 2 else parts[0], LANES // 2
        while step:
            order = ir.Constant(_INTS, [(lane + step) % LANES for lane in range(LANES)])
            total = builder.fadd(total, builder.shuffle_vector(total, total, order))
            step //= 2
        return builder.extract_element(total, _INT(0))

    return types.float32(size, types.int64), generate


def _spread(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Fill all lanes with the float32 at that address."""
    number = builder.load(pointer(builder, address, FLOAT), align=4)
    first = builder.insert_element(ir.Constant(SUMS, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, ir.Constant(SUMS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))
