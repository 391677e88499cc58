"""Tiles of codes as bfloat16, bit for bit what the file's blocks stand for: see `engine.kernels.quant.layouts`.

Dequantised just before they are multiplied, matrices are the same bfloat16 as if they were stored so, and no answer
changes. A scale times a code is exact in float32, and so is a scale of two factors: one rounding follows, whether the
offset is added by the same instruction or by another, and then the one to bfloat16. Zeros of both signs count as equal.
Numbers below 2**-126, which only MXFP4 has, become zeros, as they do in the instructions that multiply bfloat16.

Integers become floats without a conversion, whose units are the scarcest. Up to 32 values are looked up. Larger codes
lie where a float has its mantissa: with an exponent put above them, they read as a power of two plus the code, and an
exact constant then removes that power, the bias and the scale's product with both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import TILE_BYTES, fetch_line, opaque
from engine.kernels.quant.layouts import LAYOUTS, STEP, QuantLayout
from engine.kernels.simd import LANES, call_intrinsic, features, fused, integers, pointer

_BYTE, _HALF, _INT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _PAIR = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), _INT, _INT))
_PAIRS = STEP // 2
_LINE = 64
Halves = tuple[ir.Value, ir.Value]
"""A number for each output, twice: of outputs 0 to 7, and of 8 to 15."""


class TileHead(NamedTuple):
    """What a tile's steps share, as pairs of vectors: scales and offsets, and what undoes the powers of two in factors
    (see above).
    """

    scales: Halves
    offsets: Halves | None
    unscaled: Halves | None
    unset: Halves | None


@intrinsic(prefer_literal=True)
def tile_offset(context: Any, layout: Any, step: Any) -> Any:
    """Return how far after its panel's begin the tile lies whose first step is `step`. layout: the layout's number, a
    constant.
    """
    of = LAYOUTS[layout.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.mul(builder.udiv(args[1], _WORD(of.steps)), _WORD(of.tile_bytes))

    return types.int64(layout, types.int64), generate


@intrinsic(prefer_literal=True)
def unpack_steps(context: Any, layout: Any, weights: Any, count: Any, place: Any, later: Any) -> Any:
    """Unpack the first `count` steps, of whole tiles, of consecutive tiles at `weights` as bfloat16 to `place`, 1024
    bytes each, and prefetch as many tiles at `later`. layout: the layout's number, a constant.
    """
    of = LAYOUTS[layout.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, count, place, later = args[1:]
        share = -(-of.tile_bytes // of.steps // _LINE) * _LINE
        with cgutils.for_range(builder, builder.udiv(count, _WORD(of.steps))) as tiles:
            begin = builder.mul(tiles.index, _WORD(of.tile_bytes))
            tile, next_tile = builder.add(weights, begin), builder.add(later, begin)
            goal = builder.add(place, builder.mul(tiles.index, _WORD(of.steps * TILE_BYTES)))
            head = open_tile(builder, of, tile)
            with cgutils.for_range(builder, _WORD(of.steps)) as loop:
                ahead = builder.add(next_tile, builder.mul(loop.index, _WORD(share)))
                for line in range(0, share, _LINE):
                    fetch_line(builder, builder.add(ahead, _WORD(line)))
                at = builder.add(goal, builder.mul(loop.index, _WORD(TILE_BYTES)))
                unpack_pairs(builder, of, tile, loop.index, head, at)
        return context.get_dummy_value()

    return types.void(layout, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def unpack_at(context: Any, layout: Any, weights: Any, step: Any, place: Any) -> Any:
    """Unpack a step of the panel at `weights` to `place`. layout: the layout's number, a constant."""
    of = LAYOUTS[layout.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        unpack_step(builder, of, *args[1:])
        return context.get_dummy_value()

    return types.void(layout, types.int64, types.int64, types.int64), generate


def unpack_step(builder: ir.IRBuilder, layout: QuantLayout, weights: ir.Value, step: ir.Value, place: ir.Value) -> None:
    """Unpack a step of the panel at `weights` as bfloat16 to `place`."""
    tile, inside = place_of(builder, layout, weights, step)
    unpack_pairs(builder, layout, tile, inside, open_tile(builder, layout, tile), place)


def unpack_pairs(
    builder: ir.IRBuilder,
    layout: QuantLayout,
    tile: ir.Value,
    step: ir.Value,
    head: TileHead | None,
    place: ir.Value,
) -> None:
    """Unpack a step of a tile that was opened as bfloat16 to `place`, one pair after the other."""
    for pair, numbers in enumerate(pair_vectors(builder, layout, tile, step, head)):
        builder.store(numbers, pointer(builder, builder.add(place, _WORD(_LINE * pair)), _PAIR), align=4)


def place_of(
    builder: ir.IRBuilder, layout: QuantLayout, weights: ir.Value, step: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the address of a step's tile, and the step within it."""
    if layout.steps == 1:
        return builder.add(weights, builder.mul(step, _WORD(layout.tile_bytes))), _WORD(0)
    tile = builder.udiv(step, _WORD(layout.steps))
    at = builder.add(weights, builder.mul(tile, _WORD(layout.tile_bytes)))
    return at, builder.urem(step, _WORD(layout.steps))


def open_tile(builder: ir.IRBuilder, layout: QuantLayout, tile: ir.Value) -> TileHead | None:
    """Return what the steps of the tile at that address share; None for numbers."""
    if not layout.coded:
        return None
    scales = exponents(builder, tile) if layout.exponents else half_floats(builder, tile)
    offsets = None if layout.offset is None else half_floats(builder, builder.add(tile, _WORD(2 * LANES)))
    if layout.factors is None:
        return TileHead(_doubled(builder, scales), offsets and _doubled(builder, offsets), None, None)
    if offsets is not None:
        offsets = builder.fneg(offsets)

    def undone(numbers: ir.Value) -> Halves:
        lower, upper = _doubled(builder, builder.fmul(numbers, _floats(-(_POWER[1] + layout.factor_bias))))
        return lower, upper

    doubled = offsets and _doubled(builder, offsets)
    return TileHead(_doubled(builder, scales), doubled, undone(scales), offsets and undone(offsets))


def pair_vectors(
    builder: ir.IRBuilder, layout: QuantLayout, tile: ir.Value, step: ir.Value, head: TileHead | None
) -> Iterator[ir.Value]:
    """Yield the 16 pairs of inputs of a tile's step, each as 16 pairs of bfloat16."""
    if head is None:
        for pair in range(_PAIRS):
            yield builder.load(pointer(builder, builder.add(tile, _WORD(_LINE * pair)), _PAIR), align=4)
        return
    scales, offsets = _of_step(builder, layout, tile, step, head)
    at = builder.add(tile, builder.add(_WORD(layout.codes_at), builder.mul(step, _WORD(layout.code_bytes))))
    codes = _Codes(builder, layout, at)
    constants = offsets
    if codes.power:
        constants = [_times(builder, halves, -(codes.power + layout.bias)) for halves in scales]
    for pair in range(_PAIRS):
        group = pair * len(scales) // _PAIRS
        parts = []
        for half in range(2):
            number = codes.number(half, pair)
            scale = scales[group][half]
            if constants is None:
                parts.append(builder.fmul(number, scale))
            else:
                parts.append(fused(builder, number, scale, constants[group % len(constants)][half]))
        yield rounded(builder, *parts)


def _of_step(
    builder: ir.IRBuilder, layout: QuantLayout, tile: ir.Value, step: ir.Value, head: TileHead
) -> tuple[list[Halves], list[Halves] | None]:
    """Return a step's scales, of the whole or of both halves, and its offsets."""
    if head.unscaled is None:
        return [head.scales], None if head.offsets is None else [head.offsets]
    factors = factor_bytes(builder, layout, tile, step)
    mask, exponent = integers(0xFF << 8), integers(_EXPONENT[1])

    def of(which: int, numbers: Halves, undone: Halves) -> Halves:
        found = []
        for half in range(2):
            order = [which * LANES + 8 * half + byte // 8 for byte in range(4 * LANES)]
            shape = ir.Constant(ir.VectorType(_INT, 4 * LANES), order)
            four_times = builder.bitcast(builder.shuffle_vector(factors, factors, shape), _INTS)
            factor = builder.or_(builder.and_(opaque(builder, four_times), mask), exponent)
            found.append(fused(builder, builder.bitcast(factor, _FLOATS), numbers[half], undone[half]))
        return found[0], found[1]

    scales, offsets = [of(half, head.scales, head.unscaled) for half in range(layout.halves)], None
    if head.offsets is not None and head.unset is not None:
        offsets = [of(layout.halves + half, head.offsets, head.unset) for half in range(layout.halves)]
    return scales, offsets


def factor_bytes(builder: ir.IRBuilder, layout: QuantLayout, tile: ir.Value, step: ir.Value) -> ir.Value:
    """Load the factors of a step of the tile at that address, a byte for each output, kind by kind, bias included."""
    at = builder.add(tile, builder.add(_WORD(layout.factors_at), builder.mul(step, _WORD(layout.factor_bytes))))
    kind = ir.VectorType(_BYTE, layout.factor_bytes)
    factors = builder.load(pointer(builder, at, kind), align=1)
    if layout.factor_bits == 4:
        low, high = builder.and_(factors, _bytes(kind, 15)), builder.lshr(factors, _bytes(kind, 4))
        order = ir.Constant(ir.VectorType(_INT, 2 * kind.count), [*range(2 * kind.count)])
        factors = builder.shuffle_vector(low, high, order)
    if layout.odd:
        factors = builder.or_(builder.shl(factors, _bytes(factors.type, 1)), _bytes(factors.type, 1))
    return factors


def _bytes(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


_EXPONENT = {1: 0x47000000, 2: 0x43000000}
_POWER = {1: 2.0**15, 2: 2.0**7}
"""By the byte of a float that an integer is put into: the other bits, and the power of two that they stand for."""


class _Codes:
    """The codes of a step, at an address, as floats. power: the power of two that is added to all of them."""

    def __init__(self, builder: ir.IRBuilder, layout: QuantLayout, at: ir.Value):
        self._builder, self._layout, self._at = builder, layout, at
        self._looked_up = layout.bits < 6
        self._target = 0 if self._looked_up else 1 if layout.bits == 8 else 2
        self.power = 0.0 if self._looked_up else _POWER[self._target]
        self._put_together: dict[int, ir.Value] = {}
        self._loaded: dict[tuple[int, int], ir.Value] = {}

    def number(self, half: int, pair: int) -> ir.Value:
        """Return a pair's codes of one half of the outputs, as float32."""
        builder, bits = self._builder, self._layout.bits
        code = self._code(half, pair)
        if self._looked_up:
            return self._value(code)
        mask = integers(((1 << bits) - 1) << 8 * self._target)
        exponent = _EXPONENT[self._target] + (0x80 << 8 if self._layout.signed else 0)
        return builder.bitcast(builder.xor(builder.and_(code, mask), integers(exponent)), _FLOATS)

    def _code(self, half: int, pair: int) -> ir.Value:
        """Words with the code in the lowest bits of byte `target`, and other bits around it."""
        builder, (group, place) = self._builder, divmod(pair, 4)
        if self._layout.bits == 2:
            return self._from_bit(half, 2 * pair)
        if self._layout.bits == 3:
            return self._of_three_bits(half, pair)
        if self._layout.bits == 4:
            word, place = 2 * (pair // 8) + half, pair % 8
            codes = self._word(word, place // 2)
            return builder.lshr(codes, integers(4)) if place % 2 else codes
        if self._layout.bits == 8:
            return self._word(2 * group + half, place)
        if self._layout.bits == 6:
            return self._word(3 * half + group, place) if group < 3 else self._shifted(self._sixes(half), place)
        stored = {0: 0, 1: 1, 2: 2, 4: 3, 5: 4}.get(4 * half + group)
        return self._shifted(self._fives(4 * half + group), place) if stored is None else self._word(stored, place)

    def _of_three_bits(self, half: int, pair: int) -> ir.Value:
        """Find a pair's codes; two of them are in pieces."""
        if pair < 10:
            return self._from_bit(half, 3 * pair)
        if half == 0 or pair < 14:
            return self._from_bit(2, 3 * (pair - 10) + 18 * half)
        builder = self._builder
        lower = builder.lshr(self._word(16 - pair, 0), integers(30))  # of word 2, and of word 1
        third = builder.and_(builder.lshr(self._word(0, 0), integers(pair + 14)), integers(4))
        return builder.or_(lower, third)

    def _from_bit(self, word: int, bit: int) -> ir.Value:
        """Move stored words down so that they begin with that bit."""
        found = self._word(word, bit // 8)
        return self._builder.lshr(found, integers(bit % 8)) if bit % 8 else found

    def _word(self, word: int, byte: int) -> ir.Value:
        """Stored words, moved so that `byte` is byte `target`: loaded from another address instead of shifted."""
        if (word, byte) not in self._loaded:
            at = self._builder.add(self._at, _WORD(_LINE * word + byte - self._target))
            self._loaded[word, byte] = self._builder.load(pointer(self._builder, at, _INTS), align=1)
        return self._loaded[word, byte]

    def _shifted(self, words: ir.Value, byte: int) -> ir.Value:
        by = 8 * (byte - self._target)
        if by == 0:
            return words
        return self._builder.lshr(words, integers(by)) if by > 0 else self._builder.shl(words, integers(-by))

    def _together(self, key: int, pieces: Sequence[tuple[int, int, int]]) -> ir.Value:
        """Join the codes that are in pieces: words, how far they are shifted down, and the bits of each byte."""
        if key not in self._put_together:
            builder, made = self._builder, None
            for word, down, mask in pieces:
                words = builder.load(pointer(builder, builder.add(self._at, _WORD(_LINE * word)), _INTS), align=4)
                piece = builder.and_(builder.lshr(words, integers(down)), integers(mask * 0x01010101))
                made = piece if made is None else builder.or_(made, piece)
            self._put_together[key] = made
        return self._put_together[key]

    def _sixes(self, half: int) -> ir.Value:
        return self._together(half, [(3 * half + i, 6 - 2 * i, 3 << 2 * i) for i in range(3)])

    def _fives(self, group: int) -> ir.Value:
        pieces = {
            3: [(0, 5, 0x07), (3, 2, 0x18)],
            6: [(1, 5, 0x07), (4, 2, 0x18)],
            7: [(2, 5, 0x07), (3, 4, 0x08), (4, 3, 0x10)],
        }
        return self._together(group, pieces[group])

    def _value(self, codes: ir.Value) -> ir.Value:
        """Return what the lower bits of each lane stand for, looked up."""
        table = self._layout.table * max(1, LANES >> self._layout.bits)  # higher bits do not matter
        if "+avx512f" not in features():
            return self._calculated(codes)
        parts = [ir.Constant(_FLOATS, list(table[i : i + LANES])) for i in range(0, len(table), LANES)]
        if len(parts) == 1:
            return call_intrinsic(self._builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, *parts, codes)
        name = "llvm.x86.avx512.vpermi2var.ps.512"
        return call_intrinsic(self._builder, name, _FLOATS, parts[0], codes, parts[1])

    def _calculated(self, codes: ir.Value) -> ir.Value:
        """Look up eight values at a time, which AVX2 does, or calculate them."""
        builder, layout = self._builder, self._layout
        table = layout.table * max(1, 8 >> layout.bits)
        if layout.values is None and len(table) > 8:
            code = builder.and_(codes, integers((1 << layout.bits) - 1))
            return builder.sitofp(builder.sub(code, integers(layout.bias)), _FLOATS)
        made = self._of_eight(table[:8], codes)
        if len(table) > 8:
            upper = builder.icmp_signed("<", builder.shl(codes, integers(28)), integers(0))
            made = builder.select(upper, self._of_eight(table[8:], codes), made)
        return made

    def _of_eight(self, table: Sequence[float], codes: ir.Value) -> ir.Value:
        """Look up the lower three bits of each lane."""
        builder, floats, ints = self._builder, ir.VectorType(ir.FloatType(), 8), ir.VectorType(_INT, 8)
        values, parts = ir.Constant(floats, list(table)), []
        for half in range(2):
            some = builder.shuffle_vector(codes, codes, ir.Constant(ints, [8 * half + i for i in range(8)]))
            parts.append(call_intrinsic(builder, "llvm.x86.avx2.permps", floats, values, some))
        return builder.shuffle_vector(*parts, ir.Constant(_INTS, [*range(LANES)]))


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [float(value)] * LANES)


def _times(builder: ir.IRBuilder, halves: Halves, factor: float) -> Halves:
    return builder.fmul(halves[0], _floats(factor)), builder.fmul(halves[1], _floats(factor))


def half_floats(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return 16 numbers of float16, as float32."""
    halves = builder.load(pointer(builder, address, ir.VectorType(ir.HalfType(), LANES)), align=1)
    return builder.fpext(halves, _FLOATS)


def exponents(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return 16 exponents e, as 2**(e - 128)."""
    stored = builder.load(pointer(builder, address, ir.VectorType(_BYTE, LANES)), align=1)
    exponents = builder.zext(stored, _INTS)
    usual = builder.shl(builder.sub(exponents, integers(1)), integers(23))
    tiny = builder.shl(integers(1 << 21), exponents)
    found = builder.select(builder.icmp_unsigned("<", exponents, integers(2)), tiny, usual)
    return builder.bitcast(found, _FLOATS)


def _doubled(builder: ir.IRBuilder, numbers: ir.Value) -> Halves:
    lower, upper = (
        builder.shuffle_vector(numbers, numbers, ir.Constant(_INTS, [at + i // 2 for i in range(LANES)]))
        for at in (0, 8)
    )
    return lower, upper


def rounded(builder: ir.IRBuilder, lower: ir.Value, upper: ir.Value) -> ir.Value:
    """Return two vectors as 32 bfloat16 numbers, in words of two."""
    if "+avx512bf16" in features():
        kind = ir.FunctionType(_PAIR, [_FLOATS] * 2)
        return builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [lower, upper], side_effect=False)
    halves = []
    for numbers in (lower, upper):  # no code stands for NaN
        bits = builder.bitcast(numbers, _INTS)
        odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
        bits = builder.lshr(builder.add(bits, builder.add(odd, integers(0x7FFF))), integers(16))
        halves.append(builder.trunc(bits, ir.VectorType(_HALF, LANES)))
    order = ir.Constant(ir.VectorType(_INT, 2 * LANES), [*range(2 * LANES)])
    return builder.bitcast(builder.shuffle_vector(*halves, order), _PAIR)
