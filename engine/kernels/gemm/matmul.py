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

import platform
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from itertools import chain, groupby
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.amx import TILE_ROWS, tile_sizes, tiles_allowed
from engine.kernels.gemm.amx_kernels import amx_kernel, block_bytes
from engine.kernels.gemm.fma_kernels import WIDENED, float_sums, fma_kernel, half_sums
from engine.kernels.gemm.matmul_kernels import MATMUL, PART, PartKernel, product_kernel
from engine.kernels.gemm.vector_kernels import OWN_TOTALS, number_sums, vector_kernel
from engine.kernels.large_pages import in_large_pages
from engine.kernels.quant.layouts import BFLOAT16_LAYOUT, STEP, CodeLayout, QuantLayout
from engine.kernels.quant.pack import panels_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.simd import LANES, features
from engine.kernels.threads import Program, address_of


class Unit(Enum):
    """The instructions that multiply."""

    AMX = "amx"
    VECTORS = "avx512_bf16"
    FMA = "fma"

    def kernel(self, layout: QuantLayout) -> PartKernel:
        """Return the kernel for matrices of that layout. FMA's for bfloat16 also multiplies float32."""
        if (self, layout.number) not in _KERNELS:
            _KERNELS[self, layout.number] = _COMPILED[self](layout)
        return _KERNELS[self, layout.number]

    @property
    def title(self) -> str:
        """What processors' makers call the instructions."""
        return {Unit.AMX: "AMX", Unit.VECTORS: "AVX512-BF16", Unit.FMA: "AVX2"}[self]

    @property
    def paired(self) -> bool:
        """Whether it multiplies pairs of bfloat16."""
        return self is not Unit.FMA


_COMPILED = {Unit.AMX: amx_kernel, Unit.VECTORS: vector_kernel, Unit.FMA: fma_kernel}
_KERNELS: dict[tuple[Unit, int], PartKernel] = {}


@cache
def units(dtype: torch.dtype = torch.bfloat16) -> tuple[Unit, ...]:
    """Return the units of this processor for matrices of that type, the fastest first."""
    if dtype == torch.float32:
        return tuple(unit for unit in units() if not unit.paired)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    there = features()
    found = []
    if {"+amx-tile", "+amx-bf16", "+avx512bf16"} <= there and tiles_allowed():  # blocks are unpacked in vectors
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
    """A product, by a `Matmul` or in another way. rounds: it is of rows that are rounded to 8 bits before."""

    matmul: Matmul | None
    rounds: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x: [rows, inputs]."""


class Matmul:
    """x [rows, inputs] times a matrix [outputs, inputs] of bfloat16 or float32, plus the bias.

    weight: the matrix, or the parts of a file that hold its outputs one after the other, as bfloat16; they lie in
    memory in their own layouts. gated: the matrix is a gate and then an up projection, of a multiple of 16 outputs each
    and of one layout or of one each, and the result is silu(gate) * up.
    """

    def __init__(
        self,
        weight: Tensor | Sequence[StoredMatrix],
        bias: Tensor | None = None,
        gated: bool = False,
        unit: Unit | None = None,
    ):
        wide = isinstance(weight, Tensor) and weight.dtype == torch.float32
        self.unit = unit or units(torch.float32 if wide else torch.bfloat16)[0]
        outputs, inputs = weight.shape if isinstance(weight, Tensor) else shape_of(weight)
        self.inputs: int = inputs
        self._itemsize = 4 if wide else 2
        self.gated = gated
        self.outputs: int = outputs // (2 if gated else 1)
        self.in_turn = gated and not isinstance(weight, Tensor) and gate_apart(weight)
        self._bias = bias_of(bias, outputs, gated and not self.in_turn)
        self.tiled: list[TiledMatrix] = []
        self._tiles: Tensor | None = None  # of float32
        if wide:
            assert isinstance(weight, Tensor)
            self._tiles = _float_tiles(weight, gated)
        else:
            stored = [StoredMatrix.of_numbers(weight)] if isinstance(weight, Tensor) else in_panels(weight)
            code_layout = CodeLayout.PAIRS if self.unit is Unit.AMX else CodeLayout.WORDS
            self.tiled = tiled_parts(stored, gated and not self.in_turn, code_layout)
        self._parts = self._records()
        self.kernel = product_kernel()

    @property
    def bytes(self) -> int:
        """Bytes of memory that the matrix takes."""
        tensors = [matrix.tiles for matrix in self.tiled] if self._tiles is None else [self._tiles]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def coded(self) -> bool:
        """Whether a part of the matrix is in codes."""
        return any(matrix.layout.coded for matrix in self.tiled)

    def _records(self) -> NDArray[Any]:
        """Return a PART for each layout."""
        if self._tiles is None:
            made = part_records(self.tiled, lambda layout: self.unit.kernel(layout))
        else:
            made = np.zeros(1, PART)
            made["kernel"] = self.unit.kernel(BFLOAT16_LAYOUT).address
            made["weights"], made["panels"] = self._tiles.data_ptr(), len(self._tiles)
            made["panel_bytes"] = self._tiles[0].nbytes
        if self.unit is not Unit.AMX:
            of_halves = number_sums if self.unit is Unit.VECTORS else half_sums
            made["number_sums"] = (of_halves if self._tiles is None else float_sums)().address
        return made

    @property
    def padded(self) -> int:
        """Inputs that the kernel reads of each row of x."""
        return -(-self.inputs // STEP) * STEP

    def scratch_bytes(self, rows: int) -> int:
        """Return the bytes of scratch that each thread needs for so many rows or fewer."""
        if self.unit is Unit.AMX:
            return block_bytes(rows)
        if self.unit is Unit.VECTORS:
            return OWN_TOTALS
        totals = self.padded // LANES if self.coded else 0
        return 0 if self._itemsize == 4 else 4 * WIDENED * (self.padded + totals)

    def shared_bytes(self, rows: int) -> int:
        """Return the bytes of scratch that all threads together need for so many rows."""
        groups = self.padded // min((matrix.layout.group for matrix in self.tiled), default=STEP)
        return rows * groups * 4 if self.coded and self.unit is Unit.VECTORS else 0

    def gate_bytes(self, rows: int) -> int:
        """Return the bytes of scratch in which gates of so many rows wait for the up projection."""
        return 4 * rows * self.outputs if self.in_turn else 0

    def record(self, rows: int, x: int, out: int) -> np.ndarray[Any, Any]:
        """Return a record for the kernel, without its scratch, for `rows` rows or fewer, at least one. x: address of
        [rows, padded]; out: of [rows, outputs].
        """
        made = np.zeros(1, MATMUL)
        record = made[0]
        record["parts"], record["count"] = address_of(self._parts), len(self._parts)
        record["bias"] = 0 if self._bias is None else self._bias.data_ptr()
        record["inputs"], record["outputs"] = self.padded, self.outputs * (2 if self.gated else 1)
        record["gated"], record["x"], record["out"], record["width"] = self.gated, x, out, self._itemsize
        record["scratch_bytes"], record["shared_bytes"] = self.scratch_bytes(rows), self.shared_bytes(rows)
        record["gate_bytes"] = self.gate_bytes(rows)
        record["rows"], record["tiles"] = row_words(rows)
        return made

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x: [rows, inputs]. Raises RuntimeError for another shape or type: the kernel does not check them."""
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
    each = torch.get_num_threads() * records["scratch_bytes"]
    needed = int((each + records["shared_bytes"] + records["gate_bytes"]).max())
    scratch = held if len(held) >= needed else held.new_empty(needed)
    records["scratch"] = scratch.data_ptr()
    return scratch


def row_words(rows: int) -> tuple[int, int]:
    """Return a record's `rows` and `tiles` for that row count."""
    return rows, _CONFIGURATIONS_AT + 64 * min(rows, TILE_ROWS)


def tiled_parts(parts: Sequence[StoredMatrix], gated: bool, code_layout: CodeLayout) -> list[TiledMatrix]:
    """Return the outputs of all parts, one after the other, as a matrix for each layout. gated: a panel of the first
    half is followed by one of the second.
    """
    panels = list(chain.from_iterable(panels_of(matrix) for matrix in parts))
    if gated:
        panels = [panels[i] for i in alternate(torch.arange(len(panels)), 1).tolist()]
    layouts = groupby(panels, lambda panel: panel.matrix.layout)
    return [TiledMatrix(list(some), code_layout) for _, some in layouts]


def part_records(tiled: Sequence[TiledMatrix], kernel_of: Callable[[QuantLayout], PartKernel]) -> NDArray[Any]:
    """Return a PART for each matrix."""
    made, first = np.zeros(len(tiled), PART), 0
    for record, matrix in zip(made, tiled, strict=True):
        record["kernel"], record["first"] = kernel_of(matrix.layout).address, first
        record["weights"], record["panels"] = matrix.tiles.data_ptr(), len(matrix.tiles)
        record["panel_bytes"] = matrix.panel_bytes
        first += len(matrix.tiles)
    return made


def gate_and_up(parts: Sequence[StoredMatrix]) -> bool:
    """Return whether the halves of these outputs can be gated at once: whole panels, each with one layout."""
    one_layout = len({part.layout for part in parts}) == 1
    return shape_of(parts)[0] % (2 * LANES) == 0 and (one_layout or gate_apart(parts))


def gate_apart(parts: Sequence[StoredMatrix]) -> bool:
    """Return whether the first part is all of a gate, the second its up projection, each with a layout of its own."""
    return len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].layout != parts[1].layout


def bias_of(bias: Tensor | None, outputs: int, gated: bool) -> Tensor | None:
    """Return the bias of all outputs of whole panels, in their order."""
    if bias is None:
        return None
    whole = torch.zeros(-(-outputs // LANES) * LANES, dtype=torch.float32)
    whole[:outputs] = bias.detach()
    return whole[alternate(torch.arange(len(whole)))] if gated else whole


def shape_of(parts: Sequence[StoredMatrix]) -> tuple[int, int]:
    """Return the shape of the matrix of their outputs. Raises ValueError if they differ in their inputs."""
    shapes = [part.shape for part in parts]
    if len({inputs for _, inputs in shapes}) != 1:
        raise ValueError(f"matrices of shapes {shapes} are no parts of one")
    return sum(outputs for outputs, _ in shapes), shapes[0][1]


def in_panels(parts: Sequence[StoredMatrix]) -> Sequence[StoredMatrix]:
    """Return the parts, or one of their numbers if panels of 16 outputs cannot be kept apart."""
    if all(part.shape[0] % LANES == 0 for part in parts[:-1]):
        return parts
    return [StoredMatrix.of_numbers(torch.cat([part.values() for part in parts]))]


def _float_tiles(weight: Tensor, gated: bool) -> Tensor:
    """Return [panels, steps, 32 inputs, 16 outputs] float32."""
    panels, steps = -(-weight.shape[0] // LANES), -(-weight.shape[1] // STEP)
    full = weight.new_zeros(panels * LANES, steps * STEP)
    full[: len(weight), : weight.shape[1]] = weight.detach()
    if gated:
        full = alternate(full)
    return in_large_pages(full.view(panels, LANES, steps, STEP).permute(0, 2, 3, 1))


def alternate(both: Tensor, size: int = LANES) -> Tensor:
    """Take `size` of the first half, as many of the second, and so on."""
    return both.view(2, -1, size, *both.shape[1:]).transpose(0, 1).reshape(both.shape)
