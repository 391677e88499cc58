"""Codes in words, looked up as bfloat16 with AVX512: see `engine.kernels.quant.layouts`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from engine.kernels.quant.layouts import STEP, QuantLayout
from engine.kernels.simd import LANES, pointer

_PAIRS = STEP // 2
_LINE = 64
_HALF, _INT, _WORD = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_WORDS, _INTS = ir.VectorType(_HALF, 2 * LANES), ir.VectorType(_INT, LANES)


def word_pairs(builder: ir.IRBuilder, layout: QuantLayout, address: ir.Value) -> Iterator[ir.Value]:
    """Yield the codes of a step at that address, less the bias: its 16 pairs of inputs, each as 16 pairs
    of bfloat16.
    """
    of = _Words(builder, layout, address)
    for pair in range(_PAIRS):
        yield builder.bitcast(of.numbers(pair), _INTS)


class _Words:
    def __init__(self, builder: ir.IRBuilder, layout: QuantLayout, address: ir.Value):
        self.builder, self.layout, self.address = builder, layout, address
        self._loaded: dict[int, ir.Value] = {}

    def numbers(self, pair: int) -> ir.Value:
        """Return 32 bfloat16 numbers: of the 16 outputs, both inputs of the pair."""
        return self._converted(pair) if self.layout.bits == 8 else self._looked_up(self._codes(pair))

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
            kind, name = ir.FunctionType(_WORDS, [_WORDS] * 2), "llvm.x86.avx512.permvar.hi.512"
            look_up = cgutils.get_or_insert_function(self.builder.module, kind, name)
            return self.builder.call(look_up, [ir.Constant(_WORDS, table), codes])
        kind, name = ir.FunctionType(_WORDS, [_WORDS] * 3), "llvm.x86.avx512.vpermi2var.hi.512"
        look_up = cgutils.get_or_insert_function(self.builder.module, kind, name)
        lower, upper = (ir.Constant(_WORDS, table[i : i + 2 * LANES]) for i in (0, 2 * LANES))
        return self.builder.call(look_up, [lower, codes, upper])

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
    return ir.Constant(_WORDS, [value] * (2 * LANES))
