"""Products of queries with 16 keys at once, and of weights with values, for numba kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.simd import FLOAT, FLOAT32, LANES, VECTOR, constant, fused, literal, pointer, read, spread, write

_UNROLLED = 4  # dimensions per iteration of the loop; keys are padded to a multiple of LANES


@intrinsic(prefer_literal=True)
def scores_of(context: Any, rows: Any, width: Any, dims: Any, q: Any, keys: Any, scores: Any, step: Any) -> Any:
    """Compute dot products of `rows` queries with 16 keys. rows, width: compile-time constants.

    q: address of [rows, dims] float32; keys: address of [dims, 16]; scores: where the first row's 16 go, each following
    row's `step` bytes further. Each score is the sum over the dimensions in order.
    """
    m, size = literal(rows), literal(width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims, q, keys, scores, step = args[2:]
        word = q.type
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(m)]
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
                    scalar = builder.load(pointer(builder, builder.add(start, offset), FLOAT))
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
    """Add `count` values, each times its weight, to each row's sum, in order.

    rows, width, vectors: compile-time constants; `16 * vectors` dimensions are summed. weights: address of the first
    row's float32 weights, each following row's `step` bytes further; values: address in [count, dims]; sums: address in
    [rows, dims] float32.
    """
    m, size, width_v = literal(rows), literal(width), literal(vectors)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dims, weights, step, count, values, sums = args[3:]
        word = weights.type
        cells = [[cgutils.alloca_once(builder, VECTOR) for _ in range(width_v)] for _ in range(m)]

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
                weight = spread(builder, builder.load(pointer(builder, here, FLOAT)))
                for i, cell in enumerate(cells[row]):
                    builder.store(fused(builder, weight, value[i], builder.load(cell)), cell)
        for row in range(m):
            for i in range(width_v):
                write(builder, builder.load(cells[row][i]), place(row, i), FLOAT32)
        return context.get_dummy_value()

    return types.void(rows, vectors, width, *[types.int64] * 6), generate
