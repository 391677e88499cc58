"""Matrix products at the speed of memory, whose rows do not depend on each other.

A bfloat16 matrix is stored in panels of 16 outputs, and a panel in steps of 32 inputs: [panels, steps, 16 pairs, 16
outputs, 2]. Both instructions that multiply bfloat16 read this layout: an AMX tile is a step, an AVX512-BF16 vector is
a pair. Processors without them read bfloat16, which takes half of float32's memory, and multiply it as float32. Float32
itself is stored as [panels, steps, 32 inputs, 16 outputs]. The threads share the panels, so that each reads its part of
the matrix once and in order, whatever the row count; without those instructions, once for every 64 rows.

Every result is one fixed sequence of operations over the inputs: a row of a tile is summed independently of the other
rows, and vectors take one input or pair after the other. So a row's bits are the same for any row count. Units sum in
different orders; a machine uses the same unit for all row counts.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.amx import TILE_ROWS, tile_sizes
from engine.kernels.gemm.fma_kernels import WIDENED, fma_kernel
from engine.kernels.gemm.matmul_kernels import MATMUL, amx_kernel, vector_kernel
from engine.kernels.gemm.matmul_sums import PANELS, STEP
from engine.kernels.large_pages import in_large_pages
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quantised import Form, Quantised
from engine.kernels.simd import LANES, features
from engine.kernels.threads import Kernel, Program, address_of


class Unit(Enum):
    """The instructions that multiply."""

    AMX = "amx"
    VECTORS = "avx512_bf16"
    FMA = "fma"

    def kernel(self, form: Form) -> Kernel:
        """The kernel for matrices of that form. FMA has one kernel, which reads the matrix's type from its record."""
        if (self, form) not in _KERNELS:
            _KERNELS[self, form] = fma_kernel() if self is Unit.FMA else _OF_PAIRS[self](form)
        return _KERNELS[self, form]

    @property
    def paired(self) -> bool:
        """Whether it multiplies pairs of bfloat16."""
        return self is not Unit.FMA


_OF_PAIRS = {Unit.AMX: amx_kernel, Unit.VECTORS: vector_kernel}
_KERNELS: dict[tuple[Unit, Form], Kernel] = {}


def product_kernels() -> list[Kernel]:
    """The kernels that the matrices of this process have needed so far."""
    return list(_KERNELS.values())


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def units(dtype: torch.dtype = torch.bfloat16) -> tuple[Unit, ...]:
    """The units of this processor for matrices of that type, the fastest first."""
    if dtype == torch.float32:
        return tuple(unit for unit in units() if not unit.paired)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    there = features()
    found = []
    if {"+amx-tile", "+amx-bf16", "+avx512bf16"} <= there:  # blocks are unpacked in vectors
        process = ctypes.CDLL(None)  # Linux denies tiles to processes that have not asked for them
        if process.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
            found.append(Unit.AMX)
    if {"+avx512f", "+avx512bf16"} <= there:
        found.append(Unit.VECTORS)
    if {"+avx2", "+fma"} <= there:
        found.append(Unit.FMA)
    return tuple(found)


_CONFIGURATIONS = tile_sizes([*[(None, 64)] * 6, *[(TILE_ROWS, 64)] * 2])
"""Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 the matrix."""
_CONFIGURATIONS_AT = int(_CONFIGURATIONS.ctypes.data)


class Multiplies(Protocol):
    """A product, by a `Matmul` or in another way."""

    matmul: Matmul | None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]."""


class Matmul:
    """x [rows, inputs] times a matrix [outputs, inputs] of bfloat16 or float32, plus the bias.

    gated: the matrix is a gate and then an up projection, of a multiple of 16 outputs each, and the result is
    silu(gate) * up. quantised: the same matrix, kept instead of `weight` if it equals it, bit for bit, and the unit
    multiplies pairs. weight: or the parts of a file that hold the outputs one after the other, for bfloat16.
    """

    def __init__(
        self,
        weight: Tensor | Sequence[StoredMatrix],
        bias: Tensor | None = None,
        gated: bool = False,
        unit: Unit | None = None,
        quantised: Quantised | None = None,
    ):
        if not isinstance(weight, Tensor):
            weight = torch.cat([part.values() for part in weight])
        unit = unit or units(weight.dtype)[0]
        self._itemsize = weight.itemsize
        self.gated = gated
        self.inputs: int = weight.shape[1]
        self.outputs: int = weight.shape[0] // (2 if gated else 1)
        panels, steps = -(-weight.shape[0] // LANES), -(-self.inputs // STEP)
        biases = torch.zeros(panels * LANES)
        if bias is not None:
            biases[: len(bias)] = bias.detach()
        order = torch.arange(panels * LANES)
        if gated:
            order = _alternate(order)
        self._bias = biases[order] if bias is not None else None
        self.form = Form.BFLOAT16
        self._widens = not unit.paired and weight.dtype == torch.bfloat16
        if (
            unit.paired
            and quantised is not None
            and weight.shape[0] % LANES == 0
            and torch.equal(quantised.values(), weight)
        ):
            self.form, tiles = quantised.form, quantised.rows(order).tiles()
        else:
            full = weight.detach().new_zeros(panels * LANES, steps * STEP)
            full[: len(weight), : self.inputs] = weight.detach()
            together = 2 if weight.dtype == torch.bfloat16 else 1
            tiled = full[order].view(panels, LANES, steps, STEP // together, together)
            tiles = tiled.permute(0, 2, 3, 1, 4)
        self._weights = in_large_pages(tiles)
        self.kernel = unit.kernel(self.form)

    @property
    def bytes(self) -> int:
        """Bytes of memory that the matrix takes."""
        taken: int = self._weights.nbytes
        return taken

    @property
    def padded(self) -> int:
        """Inputs that the kernel reads of each row of x."""
        return -(-self.inputs // STEP) * STEP

    @property
    def scratch_bytes(self) -> int:
        """Scratch that each thread needs."""
        if self._widens:
            return WIDENED * self.padded * 4
        return PANELS * self.padded * LANES * 2 if self.form is not Form.BFLOAT16 else 0

    def record(self, rows: int, x: int, out: int) -> np.ndarray[Any, Any]:
        """A record for the kernel, without its scratch, for at least one row. x: address of [rows, padded]; out: of
        [rows, outputs].
        """
        made = np.zeros(1, MATMUL)
        record = made[0]
        record["weights"], record["bias"] = self._weights.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()
        record["inputs"], record["outputs"] = self.padded, self.outputs * (2 if self.gated else 1)
        record["gated"], record["x"], record["out"], record["width"] = self.gated, x, out, self._itemsize
        record["scratch_bytes"] = self.scratch_bytes
        record["rows"], record["tiles"] = row_words(rows)
        return made

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]. Raises RuntimeError for another shape or type: the kernel does not check them."""
        if x.shape[1] != self.inputs or x.itemsize != self._itemsize:
            raise RuntimeError(f"x is {list(x.shape)} {x.dtype}, the matrix takes {self.inputs} inputs of its own type")
        out = x.new_empty(len(x), self.outputs)
        if len(x):
            x = F.pad(x, (0, self.padded - self.inputs)) if self.padded != self.inputs else x.contiguous()
            record = self.record(len(x), x.data_ptr(), out.data_ptr())
            scratch = give_scratch(record, NO_SCRATCH)
            self.kernel(address_of(record), self.outputs // LANES)
            del scratch  # it had to outlive the call
        return out


def add_product(
    program: Program,
    records: NDArray[Any],
    index: int,
    product: Multiplies,
    x: Tensor,
    out: Tensor,
    used: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    """Add a step that multiplies x into out: a kernel, described by the record at `index`, if the product takes rows as
    they lie in x. used: the rows of x and out in the current run, for any other product.
    """
    matmul = product.matmul
    if matmul is not None and matmul.padded == matmul.inputs:
        records[index : index + 1] = matmul.record(len(x), x.data_ptr(), out.data_ptr())
        program.add(matmul.kernel, address_of(records, index))
    else:

        def multiply_rows() -> None:
            rows, goal = used()
            goal.copy_(product(rows))

        program.call(multiply_rows)


NO_SCRATCH = torch.empty(0, dtype=torch.uint8)


def give_scratch(records: np.ndarray[Any, Any], held: Tensor) -> Tensor:
    """Give the records their scratch, which must be kept while they run: `held` if it is large enough."""
    needed = torch.get_num_threads() * int(records["scratch_bytes"].max())
    scratch = held if len(held) >= needed else held.new_empty(needed)
    records["scratch"] = scratch.data_ptr()
    return scratch


def row_words(rows: int) -> tuple[int, int]:
    """A record's `rows` and `tiles` for that row count."""
    return rows, _CONFIGURATIONS_AT + 64 * min(rows, TILE_ROWS)


def _alternate(both: Tensor) -> Tensor:
    """16 of the first half, 16 of the second, and so on."""
    return both.view(2, -1, LANES, *both.shape[1:]).transpose(0, 1).reshape(both.shape)
