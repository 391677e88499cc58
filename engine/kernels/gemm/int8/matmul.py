"""Products of rows rounded to 8 bits with a matrix in blocks, used as `engine.kernels.gemm.matmul.Matmul` is.

The threads round the rows together, wait for each other, and then each multiplies all rows with its outputs. Few rows
each thread rounds for itself, which takes no longer than waiting, and much less where cores are shared. A row's
result has the same bits whatever rows are beside it, on any number of threads and on every instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from engine.kernels.gemm.int8.dots import InstructionSet, instruction_sets
from engine.kernels.gemm.int8.layout import ROW_GROUP_BYTES, CodedMatrix, Int8Layout, rows_at_once
from engine.kernels.gemm.int8.rows import round_rows
from engine.kernels.gemm.int8.sums import sum_groups
from engine.kernels.gemm.matmul import Matmul, alternate
from engine.kernels.gemm.matmul_kernels import (
    PART,
    PartKernel,
    own_panels,
    part_kernel,
    product_kernel,
    put_sums,
)
from engine.kernels.gemm.matmul_sums import PANELS, new_room
from engine.kernels.large_pages import in_large_pages
from engine.kernels.quant.layouts import STEP as BLOCK_INPUTS
from engine.kernels.simd import LANES
from engine.kernels.threads import barrier, num_threads, thread_id

_OWN = 8192
"""Numbers of x up to which each thread rounds them all for itself."""


class Int8Matmul(Matmul):
    """Rounds x [rows, inputs], bfloat16 or float32, and multiplies it with a matrix."""

    def __init__(
        self,
        matrices: Sequence[CodedMatrix],
        bias: Tensor | None = None,
        gated: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        instructions: InstructionSet | None = None,
    ):
        """matrices: hold the outputs one after the other, each a multiple of 16 of them; one if gated. gated: as for
        `Matmul`. dtype: of x and of the result.
        """
        instructions = instruction_sets()[0] if instructions is None else instructions
        outputs, self.inputs = sum(len(matrix.codes) for matrix in matrices), int(matrices[0].codes.shape[1])
        self.gated, self.outputs = gated, outputs // (2 if gated else 1)
        self._itemsize = dtype.itemsize
        order = alternate(torch.arange(outputs)) if gated else torch.arange(outputs)
        self._bias = None if bias is None else bias.detach().float()[order]
        self.tiled = []
        ordered = [matrices[0].rows(order)] if gated else matrices
        self._int8_tiles = [in_large_pages(matrix.tiles()) for matrix in ordered]
        self._parts, first = np.zeros(len(matrices), PART), 0
        for part, matrix, tiles in zip(self._parts, matrices, self._int8_tiles, strict=True):
            part["kernel"], part["first"] = int8_kernel(instructions, matrix.layout).address, first
            part["weights"], part["panels"], part["panel_bytes"] = tiles.data_ptr(), len(tiles), tiles[0].nbytes
            first += len(tiles)
        self.kernel = product_kernel()

    @property
    def bytes(self) -> int:
        return sum(tiles.nbytes for tiles in self._int8_tiles)

    @property
    def scratch_bytes(self) -> int:
        return _OWN // BLOCK_INPUTS * ROW_GROUP_BYTES

    def shared_bytes(self, rows: int) -> int:
        return rows * self.inputs // BLOCK_INPUTS * ROW_GROUP_BYTES


_KERNELS: dict[tuple[InstructionSet, Int8Layout], PartKernel] = {}


def int8_kernel(instructions: InstructionSet, layout: Int8Layout) -> PartKernel:
    """The kernel for matrices of that layout."""
    if (instructions, layout) not in _KERNELS:
        _KERNELS[instructions, layout] = _compiled(instructions, layout)
    return _KERNELS[instructions, layout]


def _compiled(instructions: InstructionSet, layout: Int8Layout) -> PartKernel:
    used, number, most = int(instructions), layout.number, instructions.rows
    groups_of_tile = layout.groups

    @part_kernel(f"{instructions.name}_{number}")
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        groups, room = work.inputs // BLOCK_INPUTS, new_room()
        blocks = groups // groups_of_tile
        own = work.rows * work.inputs <= _OWN
        place = work.scratch + work.shared_bytes + thread_id() * work.scratch_bytes if own else work.scratch
        if part.first != 0:
            pass  # the first part's run has rounded them
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
                    sum_groups(used, number, rows, x, tiles, blocks, room + 4 * LANES * i)
                put_sums(work, row, rows, part.first + panel, width, room)
                row += rows
            panel += width

    return compiled
