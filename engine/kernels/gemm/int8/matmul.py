"""Products of rows rounded to 8 bits with a matrix in blocks, used as `engine.kernels.gemm.matmul.Matmul` is.

The threads round the rows together, wait for each other, and then each multiplies all rows with its outputs. Of few
rows each thread rounds all for itself, which takes no longer than waiting, and much less where cores are shared. A
row's result has the same bits whatever rows are beside it, on any number of threads and on every instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numba import carray
from torch import Tensor

from engine.kernels.amx import LINE_BYTES
from engine.kernels.gemm.int8.dots import InstructionSet, instruction_sets
from engine.kernels.gemm.int8.layout import ROW_GROUP_BYTES, rows_at_once
from engine.kernels.gemm.int8.rows import round_rows
from engine.kernels.gemm.int8.sums import sum_groups
from engine.kernels.gemm.matmul import Matmul, bias_of, gate_apart, part_records, shape_of, tiled_parts
from engine.kernels.gemm.matmul_kernels import PartKernel, own_panels, part_kernel, product_kernel, put_sums
from engine.kernels.gemm.matmul_sums import PANELS, ROW_BYTES, new_scratch
from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.quant.layouts import CodeLayout, QuantLayout
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES
from engine.kernels.threads import barrier, num_threads, thread_id

_OWN = 8192
"""Up to so many numbers of x each thread rounds them all for itself."""


class Int8Matmul(Matmul):
    """Rounds x [rows, inputs], bfloat16 or float32, and multiplies it with a matrix."""

    def __init__(
        self,
        parts: Sequence[StoredMatrix],
        bias: Tensor | None = None,
        gated: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        instructions: InstructionSet | None = None,
    ):
        """Pack the matrix. parts, gated: as for `Matmul`, of layouts with integer codes; of whole panels, the last one
        aside. dtype: of x and of the result.
        """
        used = instruction_sets()[0] if instructions is None else instructions
        outputs, self.inputs = shape_of(parts)
        self.gated, self.outputs = gated, outputs // (2 if gated else 1)
        self._itemsize = dtype.itemsize
        self.in_turn = gated and gate_apart(parts)
        alternating = gated and not self.in_turn
        self._bias, self._tiles = bias_of(bias, outputs, alternating), None
        self.tiled = tiled_parts(parts, alternating, CodeLayout.QUADS)
        self._parts = part_records(self.tiled, lambda layout: int8_kernel(used, layout))
        self.kernel = product_kernel()

    def scratch_bytes(self, rows: int) -> int:
        return _OWN // BLOCK_INPUTS * ROW_GROUP_BYTES

    def shared_bytes(self, rows: int) -> int:
        return rows * self.inputs // BLOCK_INPUTS * ROW_GROUP_BYTES


_KERNELS: dict[tuple[InstructionSet, QuantLayout], PartKernel] = {}


def int8_kernel(instructions: InstructionSet, layout: QuantLayout) -> PartKernel:
    """Return the kernel for matrices of that layout."""
    if (instructions, layout) not in _KERNELS:
        _KERNELS[instructions, layout] = _compiled(instructions, layout)
    return _KERNELS[instructions, layout]


def _compiled(instructions: InstructionSet, layout: QuantLayout) -> PartKernel:
    used, number, most = int(instructions), layout.number, instructions.rows
    steps = layout.steps

    @part_kernel(f"{instructions.name}_{number}")
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        groups, scratch = work.inputs // BLOCK_INPUTS, new_scratch()
        blocks = groups // steps
        own = work.rows * work.inputs <= _OWN
        place = work.scratch + work.shared_bytes + thread_id() * work.scratch_bytes if own else work.scratch
        if part.first != 0:
            pass  # the first part's run has rounded the rows
        elif own:
            round_rows(most, work.x, work.width, work.rows, groups, place, 0, 1)
        else:
            round_rows(most, work.x, work.width, work.rows, groups, place, thread_id(), num_threads())
            barrier()
        panel, end = own_panels(work, part)
        while panel < end:
            width, row = min(end - panel, PANELS), 0
            while row < work.rows:
                rows = rows_at_once(work.rows - row, most)
                x = place + row * groups * ROW_GROUP_BYTES
                for i in range(width):
                    tiles = part.weights + (panel + i) * part.panel_bytes
                    sum_groups(used, number, 1, rows, x, tiles, blocks, scratch + 4 * LANES * i, ROW_BYTES)
                put_sums(work, row, rows, part.first + panel, width, scratch, ROW_BYTES, LINE_BYTES)
                row += rows
            panel += width

    return compiled
