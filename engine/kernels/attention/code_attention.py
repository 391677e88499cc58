"""Exact attention over keys and values rounded to 8 bits: `engine.kernels.attention.kv_codes` says how they lie.

Queries are rounded to 8 bits too, in the same groups of 32 dimensions, and scores are products of integers: 16 keys lie
like 16 outputs of a Q8_0 matrix, so the sums are those of `engine.kernels.gemm.int8.sums`. Weights stay float32: each
is multiplied by the scale of its value's group and then by the codes, one position after the other.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, fetch
from engine.kernels.attention.attention_work import ATTENTION
from engine.kernels.attention.kv_codes import CODES_KIND, head_bytes, value_codes_at, value_scales_at
from engine.kernels.attention.lane_attention import attending
from engine.kernels.gemm.int8.dots import InstructionSet, instruction_sets
from engine.kernels.gemm.int8.layout import ROW_GROUP_BYTES, rows_at_once
from engine.kernels.gemm.int8.rows import round_rows
from engine.kernels.gemm.int8.sums import sum_groups
from engine.kernels.gemm.matmul_sums import row_counts, row_starts
from engine.kernels.quant.layouts import STEP as GROUP
from engine.kernels.quant.layouts import layout_of
from engine.kernels.simd import (
    FLOAT,
    FLOAT32,
    INTS,
    LANES,
    VECTOR,
    float16_at,
    float_at,
    fused,
    int_at,
    load,
    load_float16,
    multiply,
    pointer,
    put_float,
    read,
    spread,
    store,
    write,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import Kernel, kernel

FASTEST = instruction_sets()[0] if instruction_sets() else InstructionSet.AVX2
_LAYOUT = layout_of(CODES_KIND).number
_WEIGHT_BYTES = 4 * LANES
_AHEAD = 4  # the block so far ahead is prefetched
_WORD = ir.IntType(64)


def scratch_of_query(dims: int) -> int:
    """Return the bytes for a query in codes, and for its weights of a block."""
    return dims // GROUP * ROW_GROUP_BYTES + _WEIGHT_BYTES


def scoring(width: int, used: InstructionSet) -> Any:
    """Return `score` for a kernel of codes. width: of the queries' numbers, BFLOAT16 or FLOAT32. `scratch` is for their
    codes.
    """
    instructions, most = int(used), used.rows

    @subroutine
    def score(
        work: Any, queries: int, count: int, table: int, head: int, low: int, high: int, scores: int, scratch: int
    ) -> None:
        groups, step = work.dims // GROUP, work.step * 4
        round_rows(most, queries, width, count, groups, scratch, 0, 1)
        for block in range(low, high):
            at, row = next_codes(work, work.keys, table, block, high - 1, head), 0
            while row < count:
                rows = rows_at_once(count - row, most)
                codes, place = scratch + row * groups * ROW_GROUP_BYTES, scores + row * step + 4 * LANES * block
                sum_groups(instructions, _LAYOUT, 0, rows, codes, at, groups, place, step)
                row += rows

    return score


@subroutine
def next_codes(work: Any, keys_or_values: int, table: int, block: int, last: int, head: int) -> Any:
    """Return the address of a head's part of the block to read now. A later block, at most `last`, is prefetched."""
    size = head_bytes(work.dims)
    ahead = keys_or_values + (int_at(table + 4 * min(block + _AHEAD, last)) * work.kv_heads + head) * size
    for line in range(0, size, LINE_BYTES):
        fetch(ahead + line)
    return keys_or_values + (int_at(table + 4 * block) * work.kv_heads + head) * size


@subroutine
def _scaled(work: Any, block: int, group: int, lane: int, many: int, count: int, weights: int, scratch: int) -> Any:
    """Multiply the attention weights of `many` values by the values' scales in one group, store them in `scratch`, one
    row per query, and return the first product's address.
    """
    scales = value_scales_at(block, work.dims, group)
    for vector in range(count):
        of, place = weights + vector * work.step * 4, scratch + vector * _WEIGHT_BYTES
        if many == 1:  # an ancestor need not lie where its position does
            put_float(place + 4 * lane, float_at(of) * float16_at(scales + 2 * lane))
        else:  # the whole block's weights: those of other lanes are not used
            store(multiply(load(of - 4 * lane, FLOAT32), load_float16(scales)), place, FLOAT32)
    return scratch + 4 * lane


@intrinsic(prefer_literal=True)
def _add_codes(context: Any, most: Any, rows: Any, weights: Any, count: Any, codes: Any, dims: Any, sums: Any) -> Any:
    """Add `count` values of 32 dimensions, each times its weight, to each row's sum, in order.

    most: a compile-time constant, of rows. weights: address of the first row's, one row every `_WEIGHT_BYTES`. codes:
    address of the first value's, the next `dims` bytes further. sums: address of the first row's, one row every `dims`
    float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, weights, count, codes, dims, sums = args[1:]
        halves = range(GROUP // LANES)
        for number in row_counts(builder, rows, most.literal_value):
            places = [
                [builder.add(start, _WORD(4 * LANES * half)) for half in halves]
                for start in row_starts(builder, number, sums, builder.mul(dims, _WORD(4)))
            ]
            cells = [[cgutils.alloca_once(builder, VECTOR) for _ in halves] for _ in range(number)]
            for row in range(number):
                for half in halves:
                    builder.store(read(builder, places[row][half], FLOAT32), cells[row][half])
            with cgutils.for_range(builder, count) as loop:
                at = builder.add(codes, builder.mul(loop.index, dims))
                values = [numbers(builder, builder.add(at, _WORD(LANES * half))) for half in halves]
                of = builder.add(weights, builder.mul(loop.index, _WORD(4)))
                for row in range(number):
                    place = pointer(builder, builder.add(of, _WORD(row * _WEIGHT_BYTES)), FLOAT)
                    weight = spread(builder, builder.load(place, align=4))
                    for half, cell in enumerate(cells[row]):
                        builder.store(fused(builder, weight, values[half], builder.load(cell)), cell)
            for row in range(number):
                for half in halves:
                    write(builder, builder.load(cells[row][half]), places[row][half], FLOAT32)
        return context.get_dummy_value()

    return types.void(most, *[types.int64] * 6), generate


def numbers(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return the 16 signed bytes at that address, as float32."""
    kind = ir.VectorType(ir.IntType(8), LANES)
    return builder.sitofp(builder.sext(builder.load(pointer(builder, address, kind), align=1), INTS), VECTOR)


def _weighing(used: InstructionSet) -> Any:
    """Return `weigh` for a kernel of codes."""
    most = 12 if used is InstructionSet.AVX512_VNNI else 2  # queries whose sums of 32 dimensions fit into the registers

    @subroutine
    def weigh(
        work: Any, table: int, head: int, start: int, end: int, count: int, weights: int, sums: int, scratch: int
    ) -> None:
        begin, last = start, (end - 1) // LANES
        while begin < end:
            block, lane = begin // LANES, begin % LANES
            many, of_block = min(LANES - lane, end - begin), weights + 4 * (begin - start)
            at = next_codes(work, work.values, table, block, last, head)
            for group in range(work.dims // GROUP):
                of = _scaled(work, at, group, lane, many, count, of_block, scratch)
                codes, place = value_codes_at(at, work.dims, lane, group), sums + 4 * GROUP * group
                for vector in range(0, count, most):
                    rows, here = min(most, count - vector), of + vector * _WEIGHT_BYTES
                    _add_codes(most, rows, here, many, codes, work.dims, place + vector * work.dims * 4)
            begin += many

    return weigh


_attend_wide, _attend_vnni, _attend_avx2 = (
    attending(scoring(FLOAT32, used), _weighing(used)) for used in InstructionSet
)


@kernel(ATTENTION)
def _wide_kernel(address: Any) -> None:
    _attend_wide(carray(address, 1)[0])


@kernel(ATTENTION)
def _vnni_kernel(address: Any) -> None:
    _attend_vnni(carray(address, 1)[0])


@kernel(ATTENTION)
def _avx2_kernel(address: Any) -> None:
    _attend_avx2(carray(address, 1)[0])


def code_kernel(used: InstructionSet = FASTEST) -> Kernel:
    """Return the kernel for those instructions."""
    kernels = {
        InstructionSet.AVX512_VNNI: _wide_kernel,
        InstructionSet.AVX_VNNI: _vnni_kernel,
        InstructionSet.AVX2: _avx2_kernel,
    }
    return kernels[used]()
