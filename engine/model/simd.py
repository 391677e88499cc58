"""Vectors of 16 floats for numba kernels, and the operations that the exact attention is made of.

LLVM may not reorder any of these operations: a lane's result is the same bits whatever stands in the other lanes,
whichever loop it is computed in and however the loop was unrolled. On processors without 512-bit registers LLVM splits
a vector in two or four, which changes no lane.

Addresses are plain integers (`Tensor.data_ptr()`): a numba argument that is an array costs thirty times as much to pass
as a number, and a forward makes a hundred of these calls.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

binding.initialize_native_asmparser()  # one conversion has no name in LLVM's Python binding

LANES = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)

BFLOAT16, FLOAT32 = 2, 4
"""How numbers lie in memory: their bytes each."""


class Float16Lanes(types.Type):
    """Numba's type of a vector of 16 float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


vector = Float16Lanes()


@register_model(Float16Lanes)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        super().__init__(manager, kind, _VECTOR)


def constant(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _integers(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


def _pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def spread(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """All lanes hold `scalar`."""
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def read(builder: ir.IRBuilder, address: ir.Value, width: int) -> ir.Value:
    """16 numbers from memory, as float32."""
    if width == FLOAT32:
        return builder.load(_pointer(builder, address, _VECTOR), align=4)
    halves = builder.load(_pointer(builder, address, _HALVES), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, _INTS), _integers(16)), _VECTOR)


def write(builder: ir.IRBuilder, x: ir.Value, address: ir.Value, width: int) -> None:
    """The numbers to memory; to bfloat16 they are rounded to the nearest, ties to even, and NaN stays NaN."""
    if width == FLOAT32:
        builder.store(x, _pointer(builder, address, _VECTOR), align=4)
        return
    if "+avx512bf16" in features():
        kind = ir.FunctionType(_HALVES, [_VECTOR])
        halves = builder.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [x], side_effect=False)
        builder.store(halves, _pointer(builder, address, _HALVES), align=2)
        return
    bits = builder.bitcast(x, _INTS)
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _integers(0x7FFF))), _integers(16))
    rounded = builder.select(builder.fcmp_unordered("uno", x, x), _integers(0x7FC0), rounded)
    builder.store(builder.trunc(rounded, _HALVES), _pointer(builder, address, _HALVES), align=2)


@cache
def features() -> frozenset[str]:
    """What this processor can do, as LLVM names it."""
    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def power_of_two(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2 ** x for x <= 0, within two units in the last place; 0 from -127 on, for minus infinity too."""
    low, magic = constant(-127.0), constant(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    rounded = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(rounded, magic))
    p = constant(1.535336188319500e-4)
    for coefficient in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1):
        p = fused(builder, p, r, constant(coefficient))
    p = fused(builder, fused(builder, p, r, constant(6.931472028550421e-1)), r, constant(1.0))
    power = builder.shl(builder.bitcast(rounded, _INTS), _integers(23))  # the integer to the exponent's place
    return builder.bitcast(builder.add(builder.bitcast(p, _INTS), power), _VECTOR)


def exponential(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp(x), within two units in the last place for x <= 88; 0 below -87, for minus infinity too."""
    compare = builder.fcmp_ordered
    log2_e, magic = constant(math.log2(math.e)), constant(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    low, high = constant(-87.0), constant(88.0)
    tiny = compare("<", x, low)
    x = builder.select(tiny, low, x)
    x = builder.select(compare(">", x, high), high, x)
    n = builder.fsub(builder.fadd(builder.fmul(x, log2_e), magic), magic)
    r = fused(builder, n, constant(-0.693359375), x)
    r = fused(builder, n, constant(2.12194440e-4), r)
    p = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fused(builder, p, r, constant(coefficient))
    p = builder.fadd(fused(builder, p, builder.fmul(r, r), r), constant(1.0))
    power = builder.shl(builder.add(builder.fptosi(n, _INTS), _integers(127)), _integers(23))
    return builder.select(tiny, constant(0.0), builder.fmul(p, builder.bitcast(power, _VECTOR)))


def _literal(value: Any) -> Any:
    return getattr(value, "literal_value", None)


@intrinsic(prefer_literal=True)
def load(context: Any, address: Any, width: Any) -> Any:
    """The 16 numbers at `address`. width: BFLOAT16 or FLOAT32, a compile-time constant."""
    size = _literal(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return read(builder, args[0], size)

    return vector(types.int64, width), generate


@intrinsic(prefer_literal=True)
def store(context: Any, x: Any, address: Any, width: Any) -> Any:
    """The 16 numbers to `address`."""
    size = _literal(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write(builder, args[0], args[1], size)
        return context.get_dummy_value()

    return types.void(vector, types.int64, width), generate


@intrinsic(prefer_literal=True)
def splat(context: Any, x: Any) -> Any:
    """All lanes hold x."""
    return vector(types.float32), lambda context, builder, signature, args: spread(builder, args[0])


@intrinsic(prefer_literal=True)
def fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
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
    """The larger of each lane; b where they cannot be compared."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), generate


@intrinsic(prefer_literal=True)
def exp(context: Any, x: Any) -> Any:
    """exp(x)."""
    return vector(vector), lambda context, builder, signature, args: exponential(builder, args[0])


@intrinsic(prefer_literal=True)
def exp2(context: Any, x: Any) -> Any:
    """2 ** x, for x <= 0."""
    return vector(vector), lambda context, builder, signature, args: power_of_two(builder, args[0])


def _across(builder: ir.IRBuilder, x: ir.Value, join: Any) -> ir.Value:
    """All lanes joined, in halves: lane i with lane i + 8, then with i + 4, ..."""
    step = LANES // 2
    while step:
        order = [(lane + step) % LANES for lane in range(LANES)]
        x = join(x, builder.shuffle_vector(x, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_INTS, order)))
        step //= 2
    return builder.extract_element(x, ir.Constant(_INT, 0))


@intrinsic(prefer_literal=True)
def total(context: Any, x: Any) -> Any:
    """The sum of all lanes, always in the same order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _across(builder, args[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic(prefer_literal=True)
def largest(context: Any, x: Any) -> Any:
    """The largest lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _across(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(vector), generate


def _cell(kind: ir.Type) -> Any:
    def get(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], kind))

    def put(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], kind))
        return context.get_dummy_value()

    return get, put


@intrinsic(prefer_literal=True)
def float_at(context: Any, address: Any) -> Any:
    """The float32 at `address`."""
    return types.float32(types.int64), _cell(_FLOAT)[0]


@intrinsic(prefer_literal=True)
def put_float(context: Any, address: Any, x: Any) -> Any:
    """x to the float32 at `address`."""
    return types.void(types.int64, types.float32), _cell(_FLOAT)[1]


@intrinsic(prefer_literal=True)
def half_at(context: Any, address: Any) -> Any:
    """The bfloat16 at `address`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.zext(builder.load(_pointer(builder, args[0], ir.IntType(16))), _INT)
        return builder.bitcast(builder.shl(bits, ir.Constant(_INT, 16)), _FLOAT)

    return types.float32(types.int64), generate


@intrinsic(prefer_literal=True)
def put_half(context: Any, address: Any, x: Any) -> Any:
    """x, rounded, to the bfloat16 at `address`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, x = args
        bits = builder.bitcast(x, _INT)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_INT, 16)), ir.Constant(_INT, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_INT, 0x7FFF))), ir.Constant(_INT, 16))
        rounded = builder.select(builder.fcmp_unordered("uno", x, x), ir.Constant(_INT, 0x7FC0), rounded)
        builder.store(builder.trunc(rounded, ir.IntType(16)), _pointer(builder, address, ir.IntType(16)))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic(prefer_literal=True)
def copy_half(context: Any, source: Any, place: Any) -> Any:
    """The two bytes at `source`, as they are, to `place`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(_pointer(builder, args[0], ir.IntType(16)))
        builder.store(bits, _pointer(builder, args[1], ir.IntType(16)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def int_at(context: Any, address: Any) -> Any:
    """The int32 at `address`."""
    return types.int32(types.int64), _cell(_INT)[0]


@njit
def number_at(address: int, width: int) -> Any:
    """The number at `address`, as float32. width: BFLOAT16 or FLOAT32, known when it runs."""
    return half_at(address) if width == BFLOAT16 else float_at(address)


@njit
def numbers_at(address: int, width: int) -> Any:
    """The 16 numbers at `address`, as float32."""
    if width == BFLOAT16:
        return load(address, BFLOAT16)
    return load(address, FLOAT32)


_UNROLLED = 4  # dimensions of one turn of the loop; keys are padded to a multiple of LANES


@intrinsic(prefer_literal=True)
def scores_of(context: Any, rows: Any, width: Any, dims: Any, q: Any, keys: Any, scores: Any, step: Any) -> Any:
    """Dot products of `rows` queries with 16 keys. rows, width: compile-time constants.

    q: address of [rows, dims] float32; keys: address of [dims, 16]; scores: where the first row's 16 go, each other
    row's `step` bytes further. Each is the sum over the dimensions in their order.
    """
    m, size = _literal(rows), _literal(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims, q, keys, scores, step = args[2:]
        word = q.type
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(m)]
        for cell in sums:
            builder.store(constant(0.0), cell)
        stride = builder.mul(dims, ir.Constant(word, 4))
        starts = [builder.add(q, builder.mul(stride, ir.Constant(word, row))) for row in range(m)]
        with cgutils.for_range(builder, builder.udiv(dims, ir.Constant(word, _UNROLLED))) as loop:
            for turn in range(_UNROLLED):
                index = builder.add(builder.mul(loop.index, ir.Constant(word, _UNROLLED)), ir.Constant(word, turn))
                key = read(builder, builder.add(keys, builder.mul(index, ir.Constant(word, LANES * size))), size)
                offset = builder.mul(index, ir.Constant(word, 4))
                for start, cell in zip(starts, sums, strict=True):
                    scalar = builder.load(_pointer(builder, builder.add(start, offset), _FLOAT))
                    builder.store(fused(builder, spread(builder, scalar), key, builder.load(cell)), cell)
        for row, cell in enumerate(sums):
            write(builder, builder.load(cell), builder.add(scores, builder.mul(step, ir.Constant(word, row))), FLOAT32)
        return context.get_dummy_value()

    return types.void(rows, width, *[types.int64] * 5), generate


@intrinsic(prefer_literal=True)
def weigh(
    context: Any,
    rows: Any,
    vectors: Any,
    width: Any,
    dims: Any,
    weights: Any,
    step: Any,
    count: Any,
    values: Any,
    sums: Any,
) -> Any:
    """Add `count` values, each times its weight, to each row's sum, in their order.

    rows, width, vectors: compile-time constants; `16 * vectors` dimensions are summed. weights: address of the first
    row's float32 weights, each other row's `step` bytes further; values: address in [count, dims]; sums: address in
    [rows, dims] float32.
    """
    m, size, width_v = _literal(rows), _literal(width), _literal(vectors)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims, weights, step, count, values, sums = args[3:]
        word = weights.type
        cells = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(width_v)] for _ in range(m)]

        def place(row: int, i: int) -> ir.Value:
            start = builder.add(sums, builder.mul(builder.mul(dims, ir.Constant(word, 4)), ir.Constant(word, row)))
            return builder.add(start, ir.Constant(word, i * LANES * 4))

        for row in range(m):
            for i in range(width_v):
                builder.store(read(builder, place(row, i), FLOAT32), cells[row][i])
        stride = builder.mul(dims, ir.Constant(word, size))
        with cgutils.for_range(builder, count) as loop:
            at = builder.add(values, builder.mul(loop.index, stride))
            value = [read(builder, builder.add(at, ir.Constant(word, i * LANES * size)), size) for i in range(width_v)]
            offset = builder.add(weights, builder.mul(loop.index, ir.Constant(word, 4)))
            for row in range(m):
                here = builder.add(offset, builder.mul(step, ir.Constant(word, row)))
                weight = spread(builder, builder.load(_pointer(builder, here, _FLOAT)))
                for i, cell in enumerate(cells[row]):
                    builder.store(fused(builder, weight, value[i], builder.load(cell)), cell)
        for row in range(m):
            for i in range(width_v):
                write(builder, builder.load(cells[row][i]), place(row, i), FLOAT32)
        return context.get_dummy_value()

    return types.void(rows, vectors, width, *[types.int64] * 6), generate
