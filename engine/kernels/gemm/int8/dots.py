"""Sums of products of 8-bit codes on three instruction sets. All sums are whole numbers, so all three give the same.

A vector holds 32-bit lanes, one for each output, of the codes of four inputs: unsigned bytes, which count from a
layout's centre. A row's inputs are signed bytes from -127 to 127, four of them for all lanes. AVX512-VNNI and AVX-VNNI
add four products to a lane at once. AVX2 adds pairs of products as 16 bits, which would saturate beyond 32,767:
- codes of 2 and 3 bits: all 8 pairs of a group, 8 * 2 * 7 * 127 = 14,224
- codes of 4 bits: 8 pairs, 8 * 2 * 15 * 127 = 30,480
- codes of 5 bits: 4 pairs, 4 * 2 * 31 * 127 = 31,496
- codes of 6 bits: 2 pairs, 2 * 2 * 63 * 127 = 32,004
- codes of 8 bits: 1 pair of a code's amount, up to 128, and the input with the code's sign, 2 * 128 * 127 = 32,512
Values that codes stand for are looked up, and multiplied as codes of 5 bits if these hold them, otherwise of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache

from llvmlite import ir

from engine.kernels.quant.layouts import QuantLayout
from engine.kernels.simd import call_intrinsic, features, pointer, same

_BYTE, _SHORT, _INT, _WORD = (ir.IntType(bits) for bits in (8, 16, 32, 64))
PAIRS_OF_16_BITS = {2: 8, 3: 8, 4: 8, 5: 4, 6: 2}
"""With AVX2: how many pairs of products fit into 16 bits, by the bits of a code."""


class InstructionSet(IntEnum):
    """A compile-time constant of kernels."""

    AVX512_VNNI = 0
    AVX_VNNI = 1
    AVX2 = 2

    @property
    def title(self) -> str:
        """What processors' makers call it."""
        return self.name.replace("_", "-")

    @property
    def lanes(self) -> int:
        """Outputs that a vector holds."""
        return 16 if self is InstructionSet.AVX512_VNNI else 8

    @property
    def rows(self) -> int:
        """Rows that are multiplied with a group's codes while these are in registers. Their sums are there too, except
        with AVX2, where to keep four of eight in memory costs less than to unpack the codes twice.
        """
        return {InstructionSet.AVX512_VNNI: 16, InstructionSet.AVX_VNNI: 4, InstructionSet.AVX2: 8}[self]


def multiplied_codes(layout: QuantLayout, instructions: InstructionSet) -> tuple[int, int]:
    """Return the bits of a layout's codes, or of the values that they stand for, as `dot` takes them, and the number
    that they count from: 0 for the signed codes of 8 bits that AVX2 takes.
    """
    bits, bias = layout.bits, layout.bias
    if layout.values is not None:
        least = min(layout.values)
        bits, bias = (5, -least) if max(layout.values) - least < 1 << 5 else (8, 128)
    return bits, 0 if bits == 8 and instructions is InstructionSet.AVX2 else bias


@cache
def instruction_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this processor has, the fastest first."""
    there, found = features(), []
    if {"+avx512f", "+avx512bw", "+avx512vnni"} <= there:
        found.append(InstructionSet.AVX512_VNNI)
    if "+avxvnni" in there or {"+avx512vl", "+avx512vnni"} <= there:  # the same instructions in another encoding
        found.append(InstructionSet.AVX_VNNI)
    if {"+avx2", "+fma", "+f16c"} <= there:
        found.append(InstructionSet.AVX2)
    return tuple(found)


def words(lanes: int) -> ir.VectorType:
    return ir.VectorType(_INT, lanes)


def spread_word(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, lanes: int) -> ir.Value:
    """Fill all lanes with the number at that address."""
    kind = ir.VectorType(element, lanes)
    scalar = builder.load(pointer(builder, address, element), align=4)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), same(words(lanes), 0))


def looked_up(
    builder: ir.IRBuilder,
    instructions: InstructionSet,
    bias: int,
    values: Sequence[int],
    codes: Sequence[ir.Value],
) -> list[ir.Value]:
    """Look up the values of codes of up to 4 bits, as codes that count from `bias`: see `dot`."""
    name = "llvm.x86.avx512.pshuf.b.512" if instructions.lanes == 16 else "llvm.x86.avx2.pshuf.b"
    bytes_ = ir.VectorType(_BYTE, 4 * instructions.lanes)
    repeated = [value + bias for value in values] * (bytes_.count // len(values))
    table = ir.Constant(bytes_, [value & 255 for value in repeated])
    found = [call_intrinsic(builder, name, bytes_, table, builder.bitcast(code, bytes_)) for code in codes]
    return [builder.bitcast(some, code.type) for some, code in zip(found, codes, strict=True)]


def dot(
    builder: ir.IRBuilder,
    instructions: InstructionSet,
    bits: int,
    codes: Sequence[ir.Value],
    x: ir.Value,
    at: int,
    start: ir.Value,
) -> ir.Value:
    """Return start + the sums of products of codes with the inputs from byte `at` of x on, four for each vector of
    codes.

    bits: of a code; those of 8 bits count from 128 for VNNI, and AVX2 takes them signed and needs no start.
    """
    if instructions is InstructionSet.AVX2:
        return _pairs(builder, bits, codes, x, at, start)
    return _fours(builder, instructions, codes, x, at, start)


def _fours(
    builder: ir.IRBuilder,
    instructions: InstructionSet,
    codes: Sequence[ir.Value],
    x: ir.Value,
    at: int,
    start: ir.Value,
) -> ir.Value:
    """Emit the sums in assembly: LLVM would broadcast more inputs at a time than registers can hold."""
    kind, count = start.type, len(codes)
    if instructions is InstructionSet.AVX512_VNNI:  # operands: the sums, the codes, the row's address
        lines = [f"vpdpbusd {at + 4 * i}(${count + 1}){{1to16}}, ${i + 1}, $0" for i in range(count)]
        places = ["=&v", *["v"] * count, "r", "0", "~{memory}"]
        made = kind
    else:  # operands: the sums, four inputs, the codes, the row's address
        lines = []
        for i in range(count):
            lines += [f"vpbroadcastd {at + 4 * i}(${count + 2}), $1", f"vpdpbusd $1, ${i + 2}, $0"]
        places = ["=&x", "=&x", *["x"] * count, "r", "0", "~{memory}"]
        made = ir.LiteralStructType([kind, kind])
    signature = ir.FunctionType(made, [*[kind] * count, _WORD, kind])
    found = builder.asm(signature, "\n".join(lines), ",".join(places), [*codes, x, start], side_effect=True)
    return found if made is kind else builder.extract_value(found, 0)


def _pairs(
    builder: ir.IRBuilder, bits: int, codes: Sequence[ir.Value], x: ir.Value, at: int, start: ir.Value
) -> ir.Value:
    lanes = start.type.count
    bytes_, shorts = ir.VectorType(_BYTE, 4 * lanes), ir.VectorType(_SHORT, 2 * lanes)
    add_pairs, ones = "llvm.x86.avx2.pmadd.ub.sw", same(shorts, 1)
    total, together = start, PAIRS_OF_16_BITS.get(bits, 1)
    for first in range(0, len(codes), together):
        pairs = None
        for i in range(first, min(first + together, len(codes))):
            inputs = builder.bitcast(spread_word(builder, builder.add(x, _WORD(at + 4 * i)), _INT, lanes), bytes_)
            code = builder.bitcast(codes[i], bytes_)
            if bits == 8:
                inputs = call_intrinsic(builder, "llvm.x86.avx2.psign.b", bytes_, inputs, code)
                negative = builder.icmp_signed("<", code, same(bytes_, 0))
                code = builder.select(negative, builder.neg(code), code)
            products = call_intrinsic(builder, add_pairs, shorts, code, inputs)
            pairs = products if pairs is None else builder.add(pairs, products)
        total = builder.add(total, call_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", start.type, pairs, ones))
    return total
