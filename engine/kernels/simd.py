"""Vectors of 16 floats for numba kernels, and the operations that exact attention uses.

LLVM may not reorder any of these operations: a lane's result is the same bits whatever the other lanes hold, whichever
loop computes it and however that loop is unrolled. On processors without 512-bit registers LLVM splits a vector in two
or four, which changes no lane.

Addresses are plain integers (`Tensor.data_ptr()`): passing an array to numba costs thirty times as much as passing a
number, and a forward makes a hundred of these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from engine.kernels.subroutine import subroutine

binding.initialize_native_asmparser()  # one conversion has no name in LLVM's Python binding

LANES = 16
FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), ir.IntType(32)
VECTOR, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)

BFLOAT16, FLOAT32 = 2, 4
"""How numbers are stored in memory: bytes per number."""


class FloatLanes(types.Type):
    """Numba's type of a vector of 16 float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


vector = FloatLanes()


@register_model(FloatLanes)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        super().__init__(manager, kind, VECTOR)


def constant(value: float) -> ir.Constant:
    return same(VECTOR, value)


def integers(value: int) -> ir.Constant:
    return same(INTS, value)


def same(kind: ir.VectorType, value: float) -> ir.Constant:
    """Return a vector of that value."""
    return ir.Constant(kind, [value] * kind.count)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type = _BYTE) -> ir.Value:
    """Return a pointer to that address."""
    return builder.inttoptr(address, kind.as_pointer())


def spread(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Fill all lanes with `scalar`."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def call_intrinsic(builder: ir.IRBuilder, name: str, made: ir.Type, *args: ir.Value) -> ir.Value:
    """Call one of LLVM's intrinsics. made: what it returns."""
    kind = ir.FunctionType(made, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def function_apart(
    module: ir.Module, name: str, kind: ir.FunctionType, emit: Callable[..., ir.Value | None]
) -> ir.Function:
    """Return the function of that name, which `emit(builder, *args)` writes once for each module. LLVM does not copy it
    to the places that call it, since compiling would then take more than twice as long.
    """
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    if (result := emit(builder, *function.args)) is None:
        builder.ret_void()
    else:
        builder.ret(result)
    return function


def call_apart(builder: ir.IRBuilder, name: str, args: Sequence[ir.Value], emit: Callable[..., None]) -> None:
    """Call a `function_apart` that returns nothing. name: it tells apart all that the code depends on."""
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(function_apart(builder.module, name, kind, emit), args)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c, rounded once."""
    return call_intrinsic(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def read(builder: ir.IRBuilder, address: ir.Value, width: int) -> ir.Value:
    """Return 16 numbers from memory, as float32."""
    if width == FLOAT32:
        return builder.load(pointer(builder, address, VECTOR), align=4)
    halves = builder.load(pointer(builder, address, _HALVES), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), integers(16)), VECTOR)


def write(builder: ir.IRBuilder, x: ir.Value, address: ir.Value, width: int) -> None:
    """Write the numbers to memory; as bfloat16 they are rounded to nearest, ties to even, and NaN stays NaN."""
    if width == FLOAT32:
        builder.store(x, pointer(builder, address, VECTOR), align=4)
        return
    if "+avx512bf16" in features():
        kind = ir.FunctionType(_HALVES, [VECTOR])
        halves = builder.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [x], side_effect=False)
        builder.store(halves, pointer(builder, address, _HALVES), align=2)
        return
    bits = builder.bitcast(x, INTS)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, integers(0x7FFF))), integers(16))
    rounded = builder.select(builder.fcmp_unordered("uno", x, x), integers(0x7FC0), rounded)
    builder.store(builder.trunc(rounded, _HALVES), pointer(builder, address, _HALVES), align=2)


@cache
def features() -> frozenset[str]:
    """Return what this processor can do, as LLVM names it."""
    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def literal(value: Any) -> Any:
    """Return the value of a compile-time constant."""
    return getattr(value, "literal_value", None)


@intrinsic(prefer_literal=True)
def load(context: Any, address: Any, width: Any) -> Any:
    """Return the 16 numbers at `address`. width: BFLOAT16 or FLOAT32, a compile-time constant."""
    size = literal(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return read(builder, args[0], size)

    return vector(types.int64, width), generate


@intrinsic(prefer_literal=True)
def store(context: Any, x: Any, address: Any, width: Any) -> Any:
    """Store the 16 numbers at `address`."""
    size = literal(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write(builder, args[0], args[1], size)
        return context.get_dummy_value()

    return types.void(vector, types.int64, width), generate


@intrinsic(prefer_literal=True)
def splat(context: Any, x: Any) -> Any:
    """Fill all lanes with x."""
    return vector(types.float32), lambda context, builder, signature, args: spread(builder, args[0])


@intrinsic(prefer_literal=True)
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return vector(vector, vector, vector), lambda context, builder, signature, args: fused(builder, *args)


@intrinsic(prefer_literal=True)
def add(context: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic(prefer_literal=True)
def multiply(context: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic(prefer_literal=True)
def divide(context: Any, a: Any, b: Any) -> Any:
    return vector(vector, vector), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic(prefer_literal=True)
def maximum(context: Any, a: Any, b: Any) -> Any:
    """Return the larger of each lane; b where they cannot be compared."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic(prefer_literal=True)
def minimum(context: Any, a: Any, b: Any) -> Any:
    """Return the smaller of each lane; a where they cannot be compared."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), args[1], args[0])

    return vector(vector, vector), generate


def _across(builder: ir.IRBuilder, x: ir.Value, join: Any) -> ir.Value:
    """Reduce all lanes, by halves: lane i with lane i + 8, then with i + 4, ..."""
    step = LANES // 2
    while step:
        order = [(lane + step) % LANES for lane in range(LANES)]
        x = join(x, builder.shuffle_vector(x, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTS, order)))
        step //= 2
    return builder.extract_element(x, ir.Constant(_INT, 0))


@intrinsic(prefer_literal=True)
def total(context: Any, x: Any) -> Any:
    """Return the sum of all lanes, always in the same order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _across(builder, args[0], builder.fadd)

    return types.float32(vector), generate


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic(prefer_literal=True)
def larger(context: Any, a: Any, b: Any) -> Any:
    """Return the larger of each lane."""
    return vector(vector, vector), lambda context, builder, signature, args: _larger(builder, *args)


@intrinsic(prefer_literal=True)
def largest(context: Any, x: Any) -> Any:
    """Return the largest lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _across(builder, args[0], lambda a, b: _larger(builder, a, b))

    return types.float32(vector), generate


def _cell(kind: ir.Type) -> Any:
    def get(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer(builder, args[0], kind))

    def put(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], kind))
        return context.get_dummy_value()

    return get, put


@intrinsic(prefer_literal=True)
def float_at(context: Any, address: Any) -> Any:
    """Return the float32 at `address`."""
    return types.float32(types.int64), _cell(FLOAT)[0]


@intrinsic(prefer_literal=True)
def put_float(context: Any, address: Any, x: Any) -> Any:
    """Store x as the float32 at `address`."""
    return types.void(types.int64, types.float32), _cell(FLOAT)[1]


@intrinsic(prefer_literal=True)
def half_at(context: Any, address: Any) -> Any:
    """Return the bfloat16 at `address`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.zext(builder.load(pointer(builder, args[0], ir.IntType(16))), _INT)
        return builder.bitcast(builder.shl(bits, ir.Constant(_INT, 16)), FLOAT)

    return types.float32(types.int64), generate


@intrinsic(prefer_literal=True)
def float16_at(context: Any, address: Any) -> Any:
    """Return the float16 at `address`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.load(pointer(builder, args[0], ir.HalfType())), FLOAT)

    return types.float32(types.int64), generate


@intrinsic(prefer_literal=True)
def put_float16(context: Any, address: Any, x: Any) -> Any:
    """Store x, rounded, as the float16 at `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = ir.HalfType()
        builder.store(builder.fptrunc(args[1], half), pointer(builder, args[0], half), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic(prefer_literal=True)
def load_float16(context: Any, address: Any) -> Any:
    """Return the 16 float16 numbers at `address`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(builder.load(pointer(builder, args[0], kind), align=2), VECTOR)

    return vector(types.int64), generate


@intrinsic(prefer_literal=True)
def byte_at(context: Any, address: Any) -> Any:
    """Return the byte at `address`, 0 to 255."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(pointer(builder, args[0], ir.IntType(8))), _INT)

    return types.int32(types.int64), generate


@intrinsic(prefer_literal=True)
def put_half(context: Any, address: Any, x: Any) -> Any:
    """Store x, rounded, as the bfloat16 at `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, x = args
        bits = builder.bitcast(x, _INT)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_INT, 16)), ir.Constant(_INT, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_INT, 0x7FFF))), ir.Constant(_INT, 16))
        rounded = builder.select(builder.fcmp_unordered("uno", x, x), ir.Constant(_INT, 0x7FC0), rounded)
        builder.store(builder.trunc(rounded, ir.IntType(16)), pointer(builder, address, ir.IntType(16)))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic(prefer_literal=True)
def copy_half(context: Any, source: Any, place: Any) -> Any:
    """Copy the two bytes at `source` unchanged to `place`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(pointer(builder, args[0], ir.IntType(16)))
        builder.store(bits, pointer(builder, args[1], ir.IntType(16)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def int_at(context: Any, address: Any) -> Any:
    """Return the int32 at `address`, as an int64 like all other whole numbers: numba compiles a function again for
    every type of its arguments.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(pointer(builder, args[0], _INT)), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic(prefer_literal=True)
def put_int(context: Any, address: Any, x: Any) -> Any:
    """Store x as the int32 at `address`."""
    return types.void(types.int64, types.int32), _cell(_INT)[1]


@intrinsic(prefer_literal=True)
def long_at(context: Any, address: Any) -> Any:
    """Return the int64 at `address`."""
    return types.int64(types.int64), _cell(ir.IntType(64))[0]


@intrinsic(prefer_literal=True)
def put_long(context: Any, address: Any, x: Any) -> Any:
    """Store x as the int64 at `address`."""
    return types.void(types.int64, types.int64), _cell(ir.IntType(64))[1]


@subroutine
def number_at(address: int, width: int) -> Any:
    """Return the number at `address`, as float32. width: BFLOAT16 or FLOAT32, known only at run time."""
    return half_at(address) if width == BFLOAT16 else float_at(address)


@subroutine
def numbers_at(address: int, width: int) -> Any:
    """Return the 16 numbers at `address`, as float32."""
    if width == BFLOAT16:
        return load(address, BFLOAT16)
    return load(address, FLOAT32)


@subroutine
def put_numbers(x: Any, address: int, width: int) -> None:
    """Store x as the 16 numbers at `address`."""
    if width == BFLOAT16:
        store(x, address, BFLOAT16)
    else:
        store(x, address, FLOAT32)


@subroutine
def put_number(address: int, x: Any, width: int) -> None:
    """Store x as the number at `address`."""
    if width == BFLOAT16:
        put_half(address, x)
    else:
        put_float(address, x)
