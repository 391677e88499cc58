"""Products of queries with 16 keys at once, and of weights with values, for numba kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.gemm.matmul_sums import row_counts, row_starts
from engine.kernels.simd import (
    FLOAT,
    FLOAT32,
    LANES,
    VECTOR,
    call_apart,
    constant,
    fused,
    literal,
    pointer,
    read,
    spread,
    write,
)

_UNROLLED = 4  # dimensions per iteration of the loop; keys are padded to a multiple of LANES
_INT, _WORD = ir.IntType(32), ir.IntType(64)


@intrinsic(prefer_literal=True)
def scores_of(
    context: Any, most: Any, width: Any, rows: Any, dims: Any, q: Any, keys: Any, scores: Any, step: Any
) -> Any:
    """Compute dot products of `rows` queries with 16 keys. most, width: compile-time constants.

    rows: 1 to `most`; q: address of [rows, dims] float32; keys: address of [dims, 16]; scores: where the first row's 16
    go, each following row's `step` bytes further. Each score is the sum over the dimensions in order.
    """
    size = literal(width)

    def emit(builder: Any, *args: Any) -> None:
        rows, dims, q, keys, scores, step = args
        for number in row_counts(builder, rows, literal(most)):
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(number)]
            for cell in sums:
                builder.store(constant(0.0), cell)
            starts = row_starts(builder, number, q, builder.mul(dims, _WORD(4)))
            with cgutils.for_range(builder, builder.udiv(dims, _WORD(_UNROLLED))) as loop:
                for turn in range(_UNROLLED):
                    index = builder.add(builder.mul(loop.index, _WORD(_UNROLLED)), _WORD(turn))
                    key = read(builder, builder.add(keys, builder.mul(index, _WORD(LANES * size))), size)
                    offset = builder.mul(index, _WORD(4))
                    for start, cell in zip(starts, sums, strict=True):
                        scalar = builder.load(pointer(builder, builder.add(start, offset), FLOAT))
                        builder.store(fused(builder, spread(builder, scalar), key, builder.load(cell)), cell)
            for place, cell in zip(row_starts(builder, number, scores, step), sums, strict=True):
                write(builder, builder.load(cell), place, FLOAT32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_apart(builder, f"scores_{literal(most)}_{size}", args[2:], emit)
        return context.get_dummy_value()

    return types.void(most, width, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def weigh(
    context: Any,
    most: Any,
    vectors: Any,
    width: Any,
    rows: Any,
    dims: Any,
    weights: Any,
    step: Any,
    start: Any,
    end: Any,
    table: Any,
    values: Any,
    block_bytes: Any,
    sums: Any,
) -> Any:
    """Add the values at slots start to end, each times its weight, to each row's sum, in order.

    most, vectors, width: compile-time constants; `16 * vectors` dimensions are summed. rows: 1 to `most`; weights:
    address of the first row's float32 weights from slot `start` on, each following row's `step` bytes further; table:
    address of the int32 numbers of the request's blocks; values: address of block 0 in [blocks, 16, dims], where a
    block begins every `block_bytes`; sums: address in [rows, dims] float32.
    """
    size, width_v = literal(width), literal(vectors)

    def emit(builder: Any, *args: Any) -> None:
        rows, dims, weights, step, start, end, table, values, block_bytes, sums = args
        lanes, stride = _WORD(LANES), builder.mul(dims, _WORD(size))
        for number in row_counts(builder, rows, literal(most)):
            places = [
                [builder.add(place, _WORD(4 * LANES * i)) for i in range(width_v)]
                for place in row_starts(builder, number, sums, builder.mul(dims, _WORD(4)))
            ]
            cells = [[cgutils.alloca_once(builder, VECTOR) for _ in range(width_v)] for _ in range(number)]
            for row in range(number):
                for place, cell in zip(places[row], cells[row], strict=True):
                    builder.store(read(builder, place, FLOAT32), cell)
            of_rows = row_starts(builder, number, weights, step)
            blocks = builder.udiv(start, lanes), builder.udiv(builder.add(end, _WORD(LANES - 1)), lanes)
            with cgutils.for_range_slice(builder, *blocks, _WORD(1)) as (block, _):
                first = builder.mul(block, lanes)
                entry = builder.load(pointer(builder, builder.add(table, builder.mul(block, _WORD(4))), _INT))
                base = builder.add(values, builder.mul(builder.sext(entry, _WORD), block_bytes))
                low, high = _larger(builder, start, first), _smaller(builder, end, builder.add(first, lanes))
                with cgutils.for_range_slice(builder, low, high, _WORD(1)) as (slot, _):
                    at = builder.add(base, builder.mul(builder.sub(slot, first), stride))
                    value = [read(builder, builder.add(at, _WORD(LANES * size * i)), size) for i in range(width_v)]
                    offset = builder.mul(builder.sub(slot, start), _WORD(4))
                    for row in range(number):
                        here = builder.add(of_rows[row], offset)
                        weight = spread(builder, builder.load(pointer(builder, here, FLOAT)))
                        for i, cell in enumerate(cells[row]):
                            builder.store(fused(builder, weight, value[i], builder.load(cell)), cell)
            for row in range(number):
                for place, cell in zip(places[row], cells[row], strict=True):
                    write(builder, builder.load(cell), place, FLOAT32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_apart(builder, f"weigh_{literal(most)}_{width_v}_{size}", args[3:], emit)
        return context.get_dummy_value()

    return types.void(most, vectors, width, *[types.int64] * 10), generate


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.icmp_signed("<", a, b), a, b)
