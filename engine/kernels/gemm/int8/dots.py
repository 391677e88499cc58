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

import re
from collections.abc import Sequence
from enum import IntEnum
from functools import cache

from llvmlite import ir

from engine.kernels.quant.layouts import QuantLayout
from engine.kernels.simd import LANES, call_intrinsic, features, pointer, same

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
        """Rows that are multiplied with a step's codes while these are in registers. Their sums are there too, except
        in vectors of 8 outputs, where to keep them in memory costs less than to unpack the codes again.
        """
        return 16 if self is InstructionSet.AVX512_VNNI else 8


def multiplied_codes(layout: QuantLayout, instructions: InstructionSet) -> tuple[int, int]:
    """Return the bits of a layout's codes, or of the values that they stand for, as `add_products` takes them, and the
    number that they count from: 0 for the signed codes of 8 bits that AVX2 takes.
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
    """Look up the values of codes of up to 4 bits, as codes that count from `bias`: see `add_products`."""
    name = "llvm.x86.avx512.pshuf.b.512" if instructions.lanes == 16 else "llvm.x86.avx2.pshuf.b"
    bytes_ = ir.VectorType(_BYTE, 4 * instructions.lanes)
    repeated = [value + bias for value in values] * (bytes_.count // len(values))
    table = ir.Constant(bytes_, [value & 255 for value in repeated])
    found = [call_intrinsic(builder, name, bytes_, table, builder.bitcast(code, bytes_)) for code in codes]
    return [builder.bitcast(some, code.type) for some, code in zip(found, codes, strict=True)]


def first_sums(instructions: InstructionSet, starts: Sequence[ir.Value]) -> list[ir.Value] | None:
    """Return the sums that `add_products` adds to first, one for each vector of outputs, 32 bits a lane. Those of AVX2,
    which may have 16, take their starts in `whole_sums`.
    """
    return None if instructions is InstructionSet.AVX2 else [*starts]


def add_products(
    builder: ir.IRBuilder,
    instructions: InstructionSet,
    bits: int,
    codes: Sequence[Sequence[ir.Value]],
    x: ir.Value,
    at: int,
    sums: Sequence[ir.Value] | None,
) -> list[ir.Value]:
    """Return sums + the products of codes with a row's inputs from byte `at` of x on, four for each vector of codes.

    bits: of a code; those of 8 bits count from 128 for VNNI, and AVX2 takes them signed. codes: for each vector of
    outputs. sums: of `first_sums` or of an earlier call, for each vector of outputs.

    The products are emitted in assembly: LLVM would load more inputs at a time than registers can hold.
    """
    if instructions is InstructionSet.AVX2:
        added = _add_pairs(builder, bits, codes, x, at)
        return added if sums is None else [builder.add(*both) for both in zip(sums, added, strict=True)]
    assert sums is not None, "VNNI begins with sums"
    lines = []
    for i, fours in enumerate(zip(*_names(codes), strict=True)):
        if instructions is InstructionSet.AVX512_VNNI:
            lines += [f"vpdpbusd {at + 4 * i}(<x>){{1to16}}, {code}, <s{j}>" for j, code in enumerate(fours)]
        else:
            lines.append(f"vpbroadcastd {at + 4 * i}(<x>), <t0>")
            lines += [f"vpdpbusd <t0>, {code}, <s{j}>" for j, code in enumerate(fours)]
    temporary = 0 if instructions is InstructionSet.AVX512_VNNI else 1
    return _assembled(builder, lines, temporary, [code for some in codes for code in some], x, sums)


def whole_sums(
    builder: ir.IRBuilder, instructions: InstructionSet, bits: int, sums: Sequence[ir.Value], starts: Sequence[ir.Value]
) -> list[ir.Value]:
    """Return sums of `add_products`, 32 bits a lane, and the starts in them."""
    if instructions is not InstructionSet.AVX2:
        return [*sums]
    if _in_16_bits(bits):
        ones = same(ir.VectorType(_SHORT, 2 * instructions.lanes), 1)
        sums = [call_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", starts[0].type, some, ones) for some in sums]
    return [builder.add(*both) for both in zip(sums, starts, strict=True)]


def _in_16_bits(bits: int) -> bool:
    """Return whether AVX2's sums of a whole group fit into 16 bits."""
    return PAIRS_OF_16_BITS.get(bits, 1) == 8


def _add_pairs(
    builder: ir.IRBuilder, bits: int, codes: Sequence[Sequence[ir.Value]], x: ir.Value, at: int
) -> list[ir.Value]:
    """Return AVX2's sums of the products, in lanes of 16 bits if those of a group fit into them."""
    together, lines, kind = PAIRS_OF_16_BITS.get(bits, 1), list[str](), codes[0][0].type
    flat = [code for some in codes for code in some]
    ones = f"<c{len(flat)}>"
    for i, fours in enumerate(zip(*_names(codes), strict=True)):
        lines.append(f"vpbroadcastd {at + 4 * i}(<x>), <t0>")
        for j, code in enumerate(fours):
            # the first pairs make the sum, others are added to it when no more fit into 16 bits
            pairs = f"<s{j}>" if i < together else "<t1>" if together == 1 else f"<t{2 + j}>"
            product = pairs if i % together == 0 else "<t1>"
            if bits == 8:
                lines += [f"vpsignb {code}, <t0>, <t1>", f"vpabsb {code}, <t2>", f"vpmaddubsw <t1>, <t2>, {product}"]
            else:
                lines.append(f"vpmaddubsw <t0>, {code}, {product}")
            if product != pairs:
                lines.append(f"vpaddw {product}, {pairs}, {pairs}")
            if (i + 1) % min(together, len(codes[0])) == 0 and not _in_16_bits(bits):
                lines.append(f"vpmaddwd {ones}, {pairs}, {pairs}")
                lines += [f"vpaddd {pairs}, <s{j}>, <s{j}>"] if i >= together else []
    if not _in_16_bits(bits):
        flat.append(same(kind, 0x00010001))
    temporary = {2: 2 + len(codes), 1: 3}.get(together, 2)
    found = _assembled(builder, lines, temporary, flat, x, None, len(codes))
    if not _in_16_bits(bits):
        return found
    shorts = ir.VectorType(_SHORT, 2 * kind.count)
    return [builder.bitcast(some, shorts) for some in found]


def _names(codes: Sequence[Sequence[ir.Value]]) -> list[list[str]]:
    """Return what the codes are called in assembly."""
    return [[f"<c{j * len(some) + i}>" for i in range(len(some))] for j, some in enumerate(codes)]


def _assembled(
    builder: ir.IRBuilder,
    lines: Sequence[str],
    temporary: int,
    codes: Sequence[ir.Value],
    x: ir.Value,
    sums: Sequence[ir.Value] | None,
    count: int = 1,
) -> list[ir.Value]:
    """Emit assembly that adds to sums, or makes `count` new ones. Its operands: <s0>, ... the sums, <t0>, ... vectors
    that it may overwrite, <c0>, ... the codes, and <x>, the row's address.
    """
    count = count if sums is None else len(sums)
    kind, outputs, register = codes[0].type, count + temporary, "v" if codes[0].type.count == LANES else "x"
    numbers = {f"s{i}": i for i in range(count)} | {f"t{i}": count + i for i in range(temporary)}
    numbers |= {f"c{i}": outputs + i for i in range(len(codes))} | {"x": outputs + len(codes)}
    text = re.sub("<(.+?)>", lambda name: f"${numbers[name[1]]}", "\n".join(lines))
    ties = [] if sums is None else [str(i) for i in range(count)]
    places = [f"=&{register}"] * outputs + [register] * len(codes) + ["r", *ties, "~{memory}"]
    made = kind if outputs == 1 else ir.LiteralStructType([kind] * outputs)
    given = [*codes, x, *(sums or [])]
    signature = ir.FunctionType(made, [value.type for value in given])
    found = builder.asm(signature, text, ",".join(places), given, side_effect=True)
    return [found] if outputs == 1 else [builder.extract_value(found, i) for i in range(count)]
