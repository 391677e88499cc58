"""Codes in words: looked up as bfloat16 with AVX512, or as float32 with AVX2. See `engine.kernels.quant.layouts`.

With AVX2 one instruction leaves a code's bits alone in its word of 32, where they are, and another makes a float32 of
the word: the code, times 2**place. Inputs are divided by that power of two beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llvmlite import ir

from engine.kernels.quant.layouts import STEP, QuantLayout
from engine.kernels.simd import LANES, VECTOR, call_intrinsic, integers, pointer, same

_PAIRS = STEP // 2
_LINE = 64
_HALF, _INT, _WORD = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WORDS, _INTS = ir.VectorType(_HALF, 2 * LANES), ir.VectorType(_INT, LANES)
_HALF_BYTES, _HALF_WORDS = ir.VectorType(ir.IntType(8), 2 * LANES), ir.VectorType(_HALF, LANES)


def word_pairs(builder: ir.IRBuilder, layout: QuantLayout, address: ir.Value) -> Iterator[ir.Value]:
    """Yield the codes of a step at that address, less the bias: its 16 pairs of inputs, each as 16 pairs
    of bfloat16.
    """
    of = _Words(builder, layout, address)
    for pair in range(_PAIRS):
        yield builder.bitcast(of.numbers(pair), _INTS)


def word_floats(builder: ir.IRBuilder, layout: QuantLayout, address: ir.Value) -> Callable[[int], ir.Value]:
    """Return a function of an input's number in a step at that address: its codes times 2**place, as 16 float32. Codes
    count from `code_bias`.
    """
    of, width = _Words(builder, layout, address), _width(layout)

    def number(index: int) -> ir.Value:
        words, place = builder.bitcast(of.placed(index // 2), _INTS), _place(layout, index)
        if place + width == 32:  # as a whole number it would be negative
            return builder.sitofp(builder.lshr(words, integers(place)), VECTOR)
        return builder.sitofp(builder.and_(words, integers(((1 << width) - 1) << place)), VECTOR)

    return number


def place_scales(layout: QuantLayout) -> list[float]:
    """Return what the inputs of a step are multiplied by: 2**-place for each."""
    places = [_place(layout, index) for index in range(STEP)]
    return [2.0**-place if place + _width(layout) < 32 else 1.0 for place in places]


def code_bias(layout: QuantLayout) -> int:
    """Return what `word_floats` has added to each code or value."""
    return layout.bias if layout.values is None else -min(layout.values)


def _width(layout: QuantLayout) -> int:
    """Return the bits of a code, or of the value that was looked up, in a word."""
    return layout.bits if layout.values is None else 8


def _place(layout: QuantLayout, index: int) -> int:
    """Return the lowest bit of an input's code in a word of `_Words.placed`."""
    pair, together = index // 2, 16 // layout.bits
    alone = layout.values is not None or pair >= layout.bits * together
    return 16 * (index % 2) + (0 if alone else layout.bits * (pair % together))


class _Words:
    def __init__(self, builder: ir.IRBuilder, layout: QuantLayout, address: ir.Value):
        self.builder, self.layout, self.address = builder, layout, address
        self._loaded: dict[int, ir.Value] = {}

    def numbers(self, pair: int) -> ir.Value:
        """Return 32 bfloat16 numbers: of the 16 outputs, both inputs of the pair."""
        return self._converted(pair) if self.layout.bits == 8 else self._looked_up(self._codes(pair))

    def placed(self, pair: int) -> ir.Value:
        """Return words with a pair's codes from `_place` on, and any other bits around them; of types with values,
        these less their least.
        """
        layout = self.layout
        if layout.bits == 8:
            return self.builder.xor(self._word(pair // 2), _same(0x8080 if layout.signed else 0))
        if layout.values is not None:
            return self._values(self._masked(self._codes(pair), (1 << layout.bits) - 1), layout.values)
        return self._word(pair // (16 // layout.bits)) if _place(layout, 2 * pair) else self._codes(pair)

    def _values(self, codes: ir.Value, values: Sequence[int]) -> ir.Value:
        """Look up values, less their least, by the codes in the lower byte of each word."""
        table = ir.Constant(_HALF_BYTES, [value - min(values) for value in values] * (_HALF_BYTES.count // len(values)))
        parts = []
        for half in range(2):
            order = ir.Constant(ir.VectorType(_INT, LANES), [half * LANES + i for i in range(LANES)])
            some = self.builder.bitcast(self.builder.shuffle_vector(codes, codes, order), _HALF_BYTES)
            found = call_intrinsic(self.builder, "llvm.x86.avx2.pshuf.b", _HALF_BYTES, table, some)
            parts.append(self.builder.bitcast(found, _HALF_WORDS))
        return self.builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_INT, 2 * LANES), [*range(2 * LANES)]))

    def _codes(self, pair: int) -> ir.Value:
        """Return words with the code in their lowest bits, and any other bits above those that are looked up."""
        bits = self.layout.bits
        if bits < 6:
            word, place = divmod(pair, 16 // bits)
            return self._down(self._word(word), bits * place) if word < bits else self._spread()
        if pair < 12:
            return self._down(self._word(pair // 2), 6 * (pair % 2))
        low = self._down(self._word(pair - 12), 12)
        high = self._masked(self._down(self._word(4 + (pair - 12) // 2), 12 + 2 * (pair % 2)), 3)
        return self.builder.or_(low, self.builder.shl(high, _same(4)))

    def _spread(self) -> ir.Value:
        """Return the last pair's codes, of which word i has bit i at its top."""
        made = self._down(self._word(0), 15)
        for i in range(1, self.layout.bits):
            bit = self._masked(self._down(self._word(i), 15 - i), 1 << i)
            made = self.builder.or_(made, bit)
        return made

    def _looked_up(self, codes: ir.Value) -> ir.Value:
        table = [bits_of_bfloat16(value) for value in self.layout.table]
        if self.layout.bits < 6:
            table *= 2 * LANES // len(table)  # higher bits of a word than the fifth are ignored
            name = "llvm.x86.avx512.permvar.hi.512"
            return call_intrinsic(self.builder, name, _WORDS, ir.Constant(_WORDS, table), codes)
        lower, upper = (ir.Constant(_WORDS, table[i : i + 2 * LANES]) for i in (0, 2 * LANES))
        return call_intrinsic(self.builder, "llvm.x86.avx512.vpermi2var.hi.512", _WORDS, lower, codes, upper)

    def _converted(self, pair: int) -> ir.Value:
        """Return codes of 8 bits, which are signed."""
        builder, word = self.builder, self._word(pair // 2)
        if pair % 2 == 0:
            word = builder.shl(word, _same(8))
        codes = builder.ashr(word, _same(8))
        parts = []
        for half in range(2):
            order = ir.Constant(_INTS, [half * LANES + i for i in range(LANES)])
            some = builder.sext(builder.shuffle_vector(codes, codes, order), _INTS)
            parts.append(builder.sitofp(some, ir.VectorType(ir.FloatType(), LANES)))
        kind = ir.FunctionType(_INTS, [parts[0].type] * 2)
        made = builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", parts, side_effect=False)
        return builder.bitcast(made, _WORDS)

    def _word(self, index: int) -> ir.Value:
        if index not in self._loaded:
            at = self.builder.add(self.address, _WORD(_LINE * index))
            self._loaded[index] = self.builder.load(pointer(self.builder, at, _WORDS), align=4)
        return self._loaded[index]

    def _down(self, words: ir.Value, by: int) -> ir.Value:
        return self.builder.lshr(words, _same(by)) if by else words

    def _masked(self, words: ir.Value, mask: int) -> ir.Value:
        return self.builder.and_(words, _same(mask))


def bits_of_bfloat16(value: float) -> int:
    """Return the bits of a number that bfloat16 holds exactly."""
    bits = int(np.float32(value).view(np.uint32))
    assert bits & 0xFFFF == 0
    return bits >> 16


def _same(value: int) -> ir.Constant:
    return same(_WORDS, value)
