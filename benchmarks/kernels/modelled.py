"""Instructions that a processor lacks, in operations that every processor with AVX2 has: kernels for other processors
run here too, slowly, and give bits that their instructions' descriptions allow.

Numba still compiles for this processor. Each call of a lacking instruction, an intrinsic of LLVM's or a line of
assembly, is replaced in LLVM's code by a call of a function that does the same. Sources: Intel's descriptions of the
instructions, without their treatment of subnormal numbers as zero.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from llvmlite import ir
from numba.core import codegen

from engine.kernels.simd import call_intrinsic, function_apart, fused, same

_BYTE, _HALF, _INT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_OPERAND = re.compile(r"(?:(\d*)\()?\$(\d+)\)?(?:\{1to\d+\})?")


MODELLED = "TALON_MODELLED_FEATURES"
"""The environment variable with the features that `install_if_told` models."""


def install_if_told() -> None:
    """Let kernels of a processor with the features in MODELLED, if there are any, be compiled for this one. It must be
    called before kernels are imported, since some of them ask for the processor's features then.
    """
    if features := os.environ.get(MODELLED):
        _install(features)


def _install(features: str) -> None:
    from . import modelled_tiles

    modelled_tiles.install()
    version = crc32(
        b"".join(Path(module.__file__ or "").read_bytes() for module in (sys.modules[__name__], modelled_tiles))
    )
    compile_module = codegen.CPUCodeLibrary.add_ir_module

    def compile_modelled(library: Any, module: ir.Module) -> None:
        _replace_instructions(module)
        compile_module(library, module)

    def described(own: codegen.CPUCodegen) -> tuple[str, str, str]:
        return own._llvm_module.triple, f"modelled {version:x}", features

    codegen.CPUCodeLibrary.add_ir_module = compile_modelled
    codegen.CPUCodegen.magic_tuple = described  # the key of the cache on disk, and what `features` reads


def _replace_instructions(module: ir.Module) -> None:
    for call in [*_calls(module)]:
        kind, name = call.callee.function_type, call.callee.name if isinstance(call.callee, ir.Function) else ""
        if isinstance(call.callee, ir.InlineAsm):
            names = {line.partition(" ")[0] for line in call.callee.asm.split("\n")} - _ANYWHERE
            if names - {""} or call.callee.constraint.startswith("=v"):  # else it hides an address, which all can
                key = f"modelled_{crc32(str(call.callee).encode()):x}"
                call.callee = _model(module, key, kind, partial(_assembly, call.callee))
        elif name in _VECTORS:
            call.callee = _model(module, f"modelled_{name}", kind, _VECTORS[name])
        elif name.startswith("llvm.x86.t") or name == "llvm.x86.ldtilecfg":
            call.callee = _model(module, name.replace("llvm.x86.", "modelled_"), kind)


def _calls(module: ir.Module) -> Iterator[ir.CallInstr]:
    for function in module.functions:
        for block in function.blocks:
            yield from (one for one in block.instructions if isinstance(one, ir.CallInstr))


def _model(
    module: ir.Module, name: str, kind: ir.FunctionType, emit: Callable[..., ir.Value] | None = None
) -> ir.Function:
    """Return the function of that name, which `emit` writes once for each module; without it, it is a symbol."""
    if emit is not None:
        return function_apart(module, name, kind, emit)
    return module.globals[name] if name in module.globals else ir.Function(module, kind, name)


def _assembly(code: ir.InlineAsm, builder: ir.IRBuilder, *args: ir.Value) -> ir.Value:
    """Do what lines of assembly do to their operands: outputs, then inputs, some of which begin as outputs."""
    places = [place for place in code.constraint.split(",") if not place.startswith("~")]
    outputs = sum(place.startswith("=") for place in places)
    made = code.type.elements if isinstance(code.type, ir.LiteralStructType) else [code.type]
    operands: list[Any] = [*(ir.Constant(kind, ir.Undefined) for kind in made), *args]
    for place, given in zip(places[outputs:], args, strict=True):
        if place.isdigit():
            operands[int(place)] = given
    for line in code.asm.split("\n") if code.asm else []:
        name, _, rest = line.partition(" ")
        found = [*_OPERAND.finditer(rest)]
        target = int(found[-1][2])
        kind = operands[target].type
        sources = [
            operands[int(one[2])]
            if one[1] is None
            else _broadcast(builder, operands[int(one[2])], int(one[1] or 0), kind)
            for one in found
        ]
        operands[target] = _LINES[name](builder, kind, *sources)
    if len(made) == 1:
        return operands[0]
    result = ir.Constant(code.type, ir.Undefined)
    for i in range(outputs):
        result = builder.insert_value(result, operands[i], i)
    return result


def _broadcast(builder: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.VectorType) -> ir.Value:
    """Return 32 bits from memory in all words of a vector of `kind`."""
    words = ir.VectorType(_INT, kind.count)
    at = builder.inttoptr(builder.add(address, _WORD(offset)), _INT.as_pointer())
    first = builder.insert_element(ir.Constant(words, ir.Undefined), builder.load(at, align=1), _INT(0))
    return builder.bitcast(builder.shuffle_vector(first, first, ir.Constant(words, [0] * kind.count)), kind)


def _dot_of_fours(builder: ir.IRBuilder, kind: Any, x: ir.Value, codes: ir.Value, sums: ir.Value) -> ir.Value:
    """VPDPBUSD: add the products of four unsigned codes with four signed inputs to each sum."""
    bytes_, wide = ir.VectorType(_BYTE, 4 * kind.count), ir.VectorType(_INT, 4 * kind.count)
    products = builder.mul(
        builder.zext(builder.bitcast(codes, bytes_), wide), builder.sext(builder.bitcast(x, bytes_), wide)
    )
    for part in range(4):
        sums = builder.add(sums, _every(builder, products, 4, part))
    return sums


def _dot_of_pairs(builder: ir.IRBuilder, kind: Any, pair: ir.Value, matrix: ir.Value, sums: ir.Value) -> ir.Value:
    """VDPBF16PS: add the product of the second numbers to each sum, then that of the first."""
    for half in (1, 0):
        sums = fused(builder, _widened(builder, matrix, half, kind), _widened(builder, pair, half, kind), sums)
    return sums


def _widened(builder: ir.IRBuilder, pairs: ir.Value, half: int, kind: ir.VectorType) -> ir.Value:
    """Return the first or the second bfloat16 of each pair, as float32."""
    words = ir.VectorType(_INT, kind.count)
    bits = builder.bitcast(pairs, words)
    bits = builder.and_(bits, same(words, -65536)) if half else builder.shl(bits, same(words, 16))
    return builder.bitcast(bits, kind)


def _rounded(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """VCVTNEPS2BF16: round to nearest, ties to even; NaN stays NaN."""
    words = ir.VectorType(_INT, x.type.count)
    bits = builder.bitcast(x, words)
    upper = builder.lshr(bits, same(words, 16))
    odd = builder.and_(upper, same(words, 1))
    nearest = builder.lshr(builder.add(bits, builder.add(odd, same(words, 0x7FFF))), same(words, 16))
    chosen = builder.select(builder.fcmp_unordered("uno", x, x), builder.or_(upper, same(words, 64)), nearest)
    return builder.trunc(chosen, ir.VectorType(_HALF, x.type.count))


def _rounded_pairs(builder: ir.IRBuilder, kind: Any, lower: ir.Value, upper: ir.Value, _: ir.Value) -> ir.Value:
    """VCVTNE2PS2BF16: round two vectors, and put the second behind the first."""
    order = ir.Constant(ir.VectorType(_INT, 2 * lower.type.count), [*range(2 * lower.type.count)])
    both = builder.shuffle_vector(_rounded(builder, lower), _rounded(builder, upper), order)
    return builder.bitcast(both, kind)


_LINES: dict[str, Callable[..., ir.Value]] = {
    "vpbroadcastd": lambda builder, kind, x, _: x,
    "vpdpbusd": _dot_of_fours,
    "vdpbf16ps": _dot_of_pairs,
    "vcvtneps2bf16": lambda builder, kind, x, _: _rounded(builder, x),
    "vcvtne2ps2bf16": _rounded_pairs,
}
"""For each mnemonic, a function that returns the new value of the last operand. Operands are in AT&T's order, in which
assembly is written here.
"""


_ANYWHERE = frozenset(["vpbroadcastd", "vpmaddubsw", "vpmaddwd", "vpaddw", "vpaddd", "vpsignb", "vpabsb"])
"""Mnemonics of AVX2: assembly of these alone stays."""


def _looked_up(builder: ir.IRBuilder, parts: Sequence[ir.Value], places: ir.Value) -> ir.Value:
    """Return for each place, of which higher bits are ignored, that element of the parts, one after the other."""
    kind = parts[0].type
    table = builder.alloca(ir.ArrayType(kind, len(parts)))
    for i, part in enumerate(parts):
        builder.store(part, builder.gep(table, [_INT(0), _INT(i)]), align=1)
    first = builder.bitcast(table, kind.element.as_pointer())
    places = builder.and_(places, same(places.type, kind.count * len(parts) - 1))
    found = ir.Constant(kind, ir.Undefined)
    for i in range(kind.count):
        place = builder.zext(builder.extract_element(places, _INT(i)), _WORD)
        found = builder.insert_element(found, builder.load(builder.gep(first, [place])), _INT(i))
    return found


def _of_one(builder: ir.IRBuilder, table: ir.Value, places: ir.Value) -> ir.Value:
    return _looked_up(builder, [table], places)


def _of_two(builder: ir.IRBuilder, first: ir.Value, places: ir.Value, second: ir.Value) -> ir.Value:
    return _looked_up(builder, [first, second], places)


def _bytes_looked_up(builder: ir.IRBuilder, table: ir.Value, places: ir.Value) -> ir.Value:
    """VPSHUFB of 64 bytes is two of 32, which AVX2 has."""
    half = ir.VectorType(_BYTE, 32)
    order = ir.VectorType(_INT, 32)
    parts = []
    for at in (0, 32):
        some = ir.Constant(order, [at + i for i in range(32)])
        operands = [builder.shuffle_vector(x, x, some) for x in (table, places)]
        parts.append(call_intrinsic(builder, "llvm.x86.avx2.pshuf.b", half, *operands))
    return builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(_INT, 64), [*range(64)]))


_VECTORS: dict[str, Callable[..., ir.Value]] = {
    "llvm.x86.avx512.permvar.hi.512": _of_one,
    "llvm.x86.avx512.permvar.sf.512": _of_one,
    "llvm.x86.avx512.vpermi2var.hi.512": _of_two,
    "llvm.x86.avx512.vpermi2var.ps.512": _of_two,
    "llvm.x86.avx512.pshuf.b.512": _bytes_looked_up,
}


def _every(builder: ir.IRBuilder, x: ir.Value, step: int, first: int) -> ir.Value:
    """Return every `step`-th element of x from the `first` on."""
    count = x.type.count // step
    order = ir.Constant(ir.VectorType(_INT, count), [first + step * i for i in range(count)])
    return builder.shuffle_vector(x, x, order)


if __name__ == "__main__":
    install_if_told()
    from .every import check_kernels

    sys.stdout.buffer.write(msgspec.json.encode(check_kernels([int(number) for number in sys.argv[1:]])))
