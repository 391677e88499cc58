"""Products in vectors of AVX512-BF16: some rows with two panels of numbers or of codes at a time. See `matmul`."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray, cfunc, types

from engine.kernels.amx import LINE_BYTES
from engine.kernels.gemm.code_sums import put_totals, sum_codes
from engine.kernels.gemm.matmul_kernels import PartKernel, call_sums, own_panels, part_kernel, put_sums
from engine.kernels.gemm.matmul_sums import PANELS, ROW_BYTES, new_scratch, sum_vectors
from engine.kernels.jit_cache import versioned
from engine.kernels.quant.layouts import STEP, QuantLayout
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import barrier, num_threads, thread_id

AT_ONCE = 8
"""Rows whose sums of two panels fit into the vector registers."""
_FEW = 4
"""Rows below which a product takes as long as reading the matrix."""
CODE_ROWS = 8
"""Rows whose products with a group's codes in two panels fit into the vector registers."""
OWN_TOTALS = 1 << 10
"""Bytes of groups' totals up to which each thread computes them all for itself, which takes no longer than waiting."""


@cache
def number_sums() -> Any:
    """Return the compiled function `multiply`."""

    def multiply(rows: int, x: int, stride: int, weights: int, panel_bytes: int, steps: int, scratch: int) -> None:
        """Compute products of up to AT_ONCE rows with two panels of bfloat16."""
        sum_vectors(AT_ONCE, rows, x, stride, weights, panel_bytes, steps, scratch, ROW_BYTES)

    return cfunc(types.void(*[types.int64] * 7), cache=True)(versioned(multiply))


def vector_kernel(layout: QuantLayout) -> PartKernel:
    """Return the vector kernel for matrices of that layout. The last of an odd number of panels is multiplied twice, so
    that there is code for two alone.
    """
    return _codes_kernel(layout) if layout.coded else _numbers_kernel(layout)


def _numbers_kernel(layout: QuantLayout) -> PartKernel:
    @part_kernel(layout.kind)
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        panel, end = own_panels(work, part)
        steps, stride, scratch = work.inputs // STEP, work.inputs * 2, new_scratch()
        while panel < end:
            width, weights = min(end - panel, PANELS), part.weights + panel * part.panel_bytes
            apart = part.panel_bytes if width == PANELS else 0
            row = 0
            while row < work.rows:
                rows, x = rows_at_once(work.rows - row), work.x + row * stride
                call_sums(part.number_sums, rows, x, stride, weights, apart, steps, scratch)
                put_sums(work, row, rows, part.first + panel, width, scratch, ROW_BYTES, LINE_BYTES)
                row += rows
            panel += width

    return compiled


def _codes_kernel(layout: QuantLayout) -> PartKernel:
    """Looking codes up again for further rows is faster than to keep what was found."""
    number, offsets, size = layout.number, layout.offset is not None, layout.group

    @part_kernel(f"{layout.kind}_words")
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        panel, end = own_panels(work, part)
        steps, stride, scratch = work.inputs // STEP, work.inputs * 2, new_scratch()
        groups = work.inputs // size
        own = work.rows * groups * 4 <= OWN_TOTALS
        totals = work.scratch + (work.shared_bytes + thread_id() * work.scratch_bytes if own else 0)
        if offsets and own:
            put_totals(size, work.x, work.rows, groups, totals, 0, 1)
        elif offsets:
            if part.first != 0:
                barrier()  # other threads may still read the totals of the part before, whose groups may be larger
            put_totals(size, work.x, work.rows, groups, totals, thread_id(), num_threads())
            barrier()
        while panel < end:
            width, weights = min(end - panel, PANELS), part.weights + panel * part.panel_bytes
            apart = part.panel_bytes if width == PANELS else 0
            row = 0
            while row < work.rows:
                rows, x, of_rows = code_rows_at_once(work.rows - row), work.x + row * stride, totals + row * groups * 4
                sum_codes(number, CODE_ROWS, rows, x, stride, of_rows, weights, apart, steps, scratch, ROW_BYTES)
                put_sums(work, row, rows, part.first + panel, width, scratch, ROW_BYTES, LINE_BYTES)
                row += rows
            panel += width

    return compiled


@subroutine
def rows_at_once(left: int) -> int:
    """Return how many of the rows that are left to multiply next. The last group has at least `_FEW`: fewer take as
    long.
    """
    return left if left <= AT_ONCE else min(AT_ONCE, left - _FEW)


@subroutine
def code_rows_at_once(left: int) -> int:
    """Return the same for rows of a product with codes. The last group is not small, since codes are looked up for
    each.
    """
    return left if left <= CODE_ROWS else min(CODE_ROWS, left - CODE_ROWS // 4)
