"""The convolutions of DFlash 2 around the attention and the MLP of a layer, by which a row of a block sees those before
it.

What enters a part, and what leaves it, becomes the sum over some taps t of (base[t] + of_row[t]) * x[row - t], in the
row's block alone. `base` has a factor of each column, `of_row` one of a group of columns, which a projection makes of
the part's normed input, for both sides at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from drafters.heads.layers import Linear
from drafters.heads.matrices import HeadTensors
from drafters.heads.one_pass.block_options import Flash2
from engine.kernels.attention.attention import LayerKeys
from engine.kernels.layer.decoder_steps import mlp_alone
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.weights import AttentionWeights, LayerWeights
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    fma,
    load,
    number_at,
    numbers_at,
    put_numbers,
    splat,
)
from engine.kernels.threads import kernel, num_threads, thread_id

SIDES = 2
CONVOLVE = np.dtype(
    [
        (name, "i8")
        for name in (
            "x",  # [rows, columns]: read and written
            "factors",  # of_row of one side: rows of [taps, groups], `stride` bytes apart
            "stride",
            "base",  # [taps, columns] float32
            "rows",
            "columns",
            "width",
            "size",  # rows of a block
            "taps",
            "group",  # columns of one, a multiple of LANES
        )
    ]
)


@kernel(CONVOLVE)
def convolve_kernel(address: Any) -> None:
    """Convolve the rows of each block in place, the last one first. A thread computes some columns of a block."""
    work = carray(address, 1)[0]
    parts, groups = work.columns // LANES, work.columns // work.group
    for unit in range(thread_id(), work.rows // work.size * parts, num_threads()):
        block, column = unit // parts * work.size, unit % parts * LANES
        for row in range(work.size - 1, -1, -1):
            factors = work.factors + (block + row) * work.stride
            place, sums = work.x + ((block + row) * work.columns + column) * work.width, splat(np.float32(0))
            for tap in range(min(work.taps, row + 1)):
                of_row = number_at(factors + (tap * groups + column // work.group) * work.width, work.width)
                factor = add(load(work.base + 4 * (tap * work.columns + column), FLOAT32), splat(of_row))
                sums = fma(factor, numbers_at(place - tap * work.columns * work.width, work.width), sums)
            put_numbers(sums, place, work.width)


class Convolution:
    """The convolutions of what enters a part of a layer and of what leaves it."""

    def __init__(self, tensors: HeadTensors, hidden: int, sizes: Flash2, size: int):
        """Take the tensors. size: rows of a block."""
        self.taps, self.group, self.size, self.hidden = sizes.taps, sizes.group, size, hidden
        self.base = tensors.vector("base_kernel", SIDES, self.taps, hidden).float().contiguous()
        outputs = SIDES * self.taps * (hidden // self.group)
        weight = tensors.matrix("kernel_projection.weight", outputs, hidden)
        self.projection = Linear(F.pad(weight, (0, 0, 0, -outputs % LANES)) if isinstance(weight, Tensor) else weight)

    def __call__(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Return [n, hidden], what the part makes of its normed input x, the rows of whole blocks."""
        made = self.projection(x)[:, : SIDES * self.taps * (self.hidden // self.group)]
        factors = made.float().unflatten(1, (SIDES, self.taps, -1)).repeat_interleave(self.group, dim=3)
        return self._convolved(part(self._convolved(x, factors[:, 0], 0)), factors[:, 1], 1)

    def _convolved(self, x: Tensor, factors: Tensor, side: int) -> Tensor:
        """Convolve the rows of each block. factors: [n, taps, hidden]."""
        blocks, of_row = (rows.unflatten(0, (-1, self.size)) for rows in (x.float(), factors))
        sums = torch.zeros_like(blocks)
        for tap in range(min(self.taps, self.size)):
            before = F.pad(blocks, (0, 0, tap, 0))[:, : self.size]
            sums += (self.base[side, tap] + of_row[:, :, tap]) * before
        return sums.flatten(0, 1).to(x.dtype)

    def record(self, program: LayerProgram, source: str, factors: str, side: int) -> NDArray[Any]:
        """Return the kernel's record, without its rows. source: the buffer that is convolved; factors: the one that
        holds these.
        """
        x, of_rows, made = program.buffers[source], program.buffers[factors], np.zeros(1, CONVOLVE)
        begins = side * self.taps * (self.hidden // self.group) * of_rows.itemsize
        fields = {"x": x.data_ptr(), "width": x.itemsize, "factors": of_rows.data_ptr() + begins}
        fields |= {"stride": of_rows.stride(0) * of_rows.itemsize, "base": self.base[side].data_ptr()}
        fields |= {"columns": self.hidden, "size": self.size, "taps": self.taps, "group": self.group}
        for name, value in fields.items():
            made[name] = value
        return made


class Convolutions:
    """The convolutions of a layer: around its attention and around its MLP."""

    def __init__(self, tensors: HeadTensors, hidden: int, sizes: Flash2, size: int):
        self.attention = Convolution(tensors.under("attention_conv."), hidden, sizes, size)
        self.mlp = Convolution(tensors.under("mlp_conv."), hidden, sizes, size)
        self._records: list[NDArray[Any]] = []

    @property
    def fits(self) -> bool:
        """Whether a program computes them."""
        return self.attention.group % LANES == 0

    def enter(self, program: LayerProgram) -> None:
        """Add what comes before the layer's queries, keys and values are made of x."""
        self._records = []
        self._begin(program, self.attention, "attention factors")

    def build(self, program: LayerProgram, weights: LayerWeights, keys: LayerKeys) -> None:
        """Add what comes after they were made."""
        mixer = weights.mixer
        assert isinstance(mixer, AttentionWeights)
        program.enter(keys, "qkv", mixer)
        program.product(mixer.out, program.attend(keys), "delta", self.attention.hidden)
        self._convolve(program, self.attention, "delta", "attention factors", 1)
        program.delta()
        program.norm(weights.inner_norm)
        self._begin(program, self.mlp, "mlp factors")
        mlp_alone(program, weights)
        self._convolve(program, self.mlp, "delta", "mlp factors", 1)

    def set_rows(self, rows: int) -> None:
        """Set the rows of the next run."""
        for record in self._records:
            record["rows"] = rows

    def _begin(self, program: LayerProgram, part: Convolution, factors: str) -> None:
        program.product(part.projection, "x", factors, part.projection.outputs)
        self._convolve(program, part, "x", factors, 0)

    def _convolve(self, program: LayerProgram, part: Convolution, source: str, factors: str, side: int) -> None:
        record = part.record(program, source, factors, side)
        self._records.append(record)
        program.step(convolve_kernel(), record)
