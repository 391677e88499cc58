"""Matrix products in ordinary vectors, for float32 and for processors that do not multiply bfloat16: see `matmul`.

A panel's step is 32 inputs of 16 outputs: float32 as [32, 16]; bfloat16 in pairs, [16, 16, 2], whose second number is
the upper half of a word and whose first becomes float32 by a shift. A sum takes one input after the other, each
multiplied and added with one rounding. Each thread first widens rows of bfloat16 for itself, some at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES
from engine.kernels.gemm.fma_sums import sum_fused_codes, totals_of_step, widen_rows
from engine.kernels.gemm.matmul_kernels import (
    PartKernel,
    call_sums,
    own_panels,
    part_kernel,
    put_sums,
)
from engine.kernels.gemm.matmul_sums import (
    BUFFER,
    PANELS,
    ROW_BYTES,
    SUMS,
    fetch_later,
    new_scratch,
    row_counts,
    sums_in_registers,
)
from engine.kernels.jit_cache import versioned
from engine.kernels.quant.layouts import STEP, QuantLayout
from engine.kernels.quant.words import code_bias
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT,
    FLOAT32,
    LANES,
    features,
    fused,
    integers,
    load,
    pointer,
    read,
    spread,
    store,
)
from engine.kernels.threads import thread_id

WIDENED = 64
"""Rows that a thread widens at once: with 1,536 inputs they fit into a core's L2 cache."""
SHARING = 12
"""Rows from which on they share the floats of a step's codes. Cycles of a Zen 3 for 8 weights of Q4_K, each block for
itself or shared: 8 rows 4.9 and 5.6, 12 rows 8.0 and 7.8.
"""
_WORD = ir.IntType(64)
_ROWS, _ROWS_OF_TWO = (8, 8) if "+avx512f" in features() else (4, 2)
"""Rows whose sums of one panel, and of two, fit into the vector registers."""


def fma_kernel(layout: QuantLayout) -> PartKernel:
    """Return the kernel for matrices of that layout, or of float32."""
    return _codes_kernel(layout) if layout.coded else _numbers_kernel(layout)


def _numbers_kernel(layout: QuantLayout) -> PartKernel:
    @part_kernel(layout.kind)
    def compiled(address: Any, at: Any) -> None:
        """Multiply the thread's panels by some rows at a time."""
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        begin, end = own_panels(work, part)
        steps, stride, sums = work.inputs // STEP, work.inputs * 4, new_scratch()
        scratch = work.scratch + thread_id() * work.scratch_bytes
        for first in range(0, work.rows, WIDENED):
            count, x = min(WIDENED, work.rows - first), work.x + first * work.inputs * work.width
            if work.width == BFLOAT16:
                for i in range(0, count * work.inputs, LANES):
                    store(load(x + 2 * i, BFLOAT16), scratch + 4 * i, FLOAT32)
                x = scratch
            panel = begin
            while panel < end:
                width = min(end - panel, PANELS)
                weights = part.weights + panel * part.panel_bytes
                for row in range(0, count, _ROWS):
                    rows = min(_ROWS, count - row)
                    call_sums(part.number_sums, rows, x + row * stride, stride, weights, width, steps, sums)
                    put_sums(work, first + row, rows, part.first + panel, width, sums, ROW_BYTES, LINE_BYTES)
                panel += width

    return compiled


def _codes_kernel(layout: QuantLayout) -> PartKernel:
    number, bias, totals_of = layout.number, code_bias(layout), totals_of_step(layout)

    @part_kernel(f"{layout.kind}_codes")
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        begin, end = own_panels(work, part)
        steps, sums = work.inputs // STEP, new_scratch()
        x = work.scratch + thread_id() * work.scratch_bytes
        totals = x + WIDENED * work.inputs * FLOAT32
        for first in range(0, work.rows, WIDENED):
            rows, panel = min(WIDENED, work.rows - first), begin
            source = work.x + first * work.inputs * BFLOAT16
            widen_rows(number, totals_of, bias, source, rows, work.inputs, x, totals)
            while panel < end:
                width = min(end - panel, PANELS)
                for i in range(width):
                    weights, place = part.weights + (panel + i) * part.panel_bytes, sums + i * LINE_BYTES
                    if rows < SHARING:
                        sum_fused_codes(number, 0, rows, x, totals, weights, steps, place, sums + BUFFER)
                    else:
                        sum_fused_codes(number, 1, rows, x, totals, weights, steps, place, sums + BUFFER)
                put_sums(work, first, rows, part.first + panel, width, sums, ROW_BYTES, LINE_BYTES)
                panel += width

    return compiled


def _sums_of(size: int) -> Callable[[], Any]:
    panel_bytes = STEP * LANES * size

    def sums(rows: int, x: int, stride: int, weights: int, width: int, steps: int, scratch: int) -> None:
        """Compute products of up to _ROWS rows with one or two panels."""
        if width == 2 and rows <= _ROWS_OF_TWO:
            sum_fused(_ROWS_OF_TWO, 2, size, rows, x, stride, weights, steps, scratch)
        else:
            for panel in range(width):
                at, place = weights + panel * steps * panel_bytes, scratch + 4 * LANES * panel
                sum_fused(_ROWS, 1, size, rows, x, stride, at, steps, place)

    @cache
    def compiled() -> Any:
        sums.__qualname__ += f"_{size}"
        return cfunc(types.void(*[types.int64] * 7), cache=True)(versioned(sums))

    return compiled


@intrinsic(prefer_literal=True)
def sum_fused(
    context: Any,
    most: Any,
    panels: Any,
    size: Any,
    rows: Any,
    x: Any,
    stride: Any,
    weights: Any,
    steps: Any,
    scratch: Any,
) -> Any:
    """Write the products of `rows` rows, at most `most`, with `panels` panels to `scratch`, [rows, 2 * 16] float32.

    most, panels, size: compile-time constants. size: bytes of a number of the matrix. x: address of the first row of
    float32, one every `stride` bytes. weights: address of the first panel.
    """
    width, of_number = panels.literal_value, size.literal_value
    tile_bytes, pair_bytes = STEP * LANES * of_number, 2 * LANES * of_number

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, x, stride, weights, steps, scratch = args[3:]
        for count in row_counts(builder, rows, most.literal_value):
            with (
                sums_in_registers(builder, count, width, x, stride, scratch, _WORD(ROW_BYTES)) as (starts, sums),
                cgutils.for_range(builder, steps) as loop,
            ):
                first = builder.add(weights, builder.mul(loop.index, _WORD(tile_bytes)))
                tiles = [builder.add(first, builder.mul(steps, _WORD(tile_bytes * i))) for i in range(width)]
                fetch_later(builder, tile_bytes, 1, loop.index, steps, weights, width)
                inputs = builder.mul(loop.index, _WORD(FLOAT32 * STEP))
                here = [builder.add(start, inputs) for start in starts]
                for pair in range(STEP // 2):
                    matrices = [
                        _pair(builder, builder.add(tile, _WORD(pair * pair_bytes)), of_number) for tile in tiles
                    ]
                    for half in range(2):
                        for row, at in zip(sums, here, strict=True):
                            number = builder.load(pointer(builder, builder.add(at, _WORD(8 * pair + 4 * half)), FLOAT))
                            for cell, matrix in zip(row, matrices, strict=True):
                                total = fused(builder, spread(builder, number), matrix[half], builder.load(cell))
                                builder.store(total, cell)
        return context.get_dummy_value()

    return types.void(most, panels, size, *[types.int64] * 6), generate


def _pair(builder: ir.IRBuilder, address: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """Return two neighbouring inputs of 16 outputs, as float32."""
    if size == FLOAT32:
        return read(builder, address, FLOAT32), read(builder, builder.add(address, _WORD(4 * LANES)), FLOAT32)
    both = builder.bitcast(read(builder, address, FLOAT32), integers(0).type)
    upper = builder.and_(both, integers(0xFFFF0000 - (1 << 32)))
    return builder.bitcast(builder.shl(both, integers(16)), SUMS), builder.bitcast(upper, SUMS)


half_sums, float_sums = _sums_of(BFLOAT16), _sums_of(FLOAT32)
