"""The context of a one-pass head on a CPU: the target's hidden states, fused and read by all layers in one program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.heads.enter import Enter
from drafters.heads.layers import DecoderLayer, Linear, RMSNorm
from drafters.heads.stack import ALONE, Stack
from engine.core.batch import Int
from engine.kernels.fused import NORM, enter_kernel, norm_kernel
from engine.kernels.gemm.matmul import NO_SCRATCH, add_product, give_scratch, row_words
from engine.kernels.gemm.matmul_kernels import MATMUL
from engine.kernels.threads import Program, address_of, words

_MOST = 512  # rows of one run


class ContextReader:
    """Writes keys and values of the context to the pool of a head's stack. fc, norm: make the context of features;
    layers: what each layer of the head reads it with.
    """

    def __init__(
        self,
        stack: Stack,
        fc: Linear,
        norm: RMSNorm,
        layers: Sequence[tuple[DecoderLayer, Linear]],
        dtype: torch.dtype,
    ):
        self.stack = stack
        self._features = torch.zeros(_MOST, fc.inputs, dtype=dtype)
        self._fused, self._context = (torch.zeros(_MOST, stack.hidden, dtype=dtype) for _ in range(2))
        self._kv = torch.zeros(_MOST, layers[0][1].outputs, dtype=dtype)
        self._enter = Enter(stack.pool, [decoder for decoder, _ in layers], self._kv, groups=0)
        self._residual, self._scale = torch.zeros(_MOST, stack.hidden), norm.weight.float().contiguous()
        self._norm = np.zeros(1, NORM)
        self._norm["residual"], self._norm["delta"] = self._residual.data_ptr(), self._fused.data_ptr()
        self._norm["weight"], self._norm["out"] = self._scale.data_ptr(), self._context.data_ptr()
        self._norm["epsilon"], self._norm["hidden"] = float(norm.eps), stack.hidden
        self._norm["width"] = dtype.itemsize
        self._products = np.zeros(1 + len(layers), MATMUL)
        self._of_products = words(self._products, "rows", "tiles")
        self._scratch, self._rows, self._program = NO_SCRATCH, 0, Program()
        self._add_product(0, fc, self._features, self._fused)
        self._program.add(norm_kernel(), address_of(self._norm), ALONE)
        for index, (_, kv) in enumerate(layers):
            self._add_product(1 + index, kv, self._context, self._kv)
            self._program.add(enter_kernel(), self._enter.address(index), ALONE)

    def read(self, features: Tensor, positions: Sequence[int], slots: Sequence[Int]) -> Tensor:
        """The context, [n, hidden], of these features, [n, layers * hidden]. positions: [n]; slots: n places in the
        pool.
        """
        at, places = np.asarray(positions, np.int32), np.concatenate(slots)
        self.stack.reserve_turns(int(at.max()) + 1)
        parts = [
            self._run(features[first : first + _MOST], at[first:], places[first:])
            for first in range(0, len(features), _MOST)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, features: Tensor, positions: Int, places: Int) -> Tensor:
        rows = self._rows = len(features)
        self._features[:rows], self._residual[:rows] = features, 0  # the norm adds what was fused to the residual
        self._norm["count"], self._of_products[:] = rows, row_words(rows)
        self._scratch = give_scratch(self._products, self._scratch)
        self._enter.begin(positions.ctypes.data, places.ctypes.data, self.stack.turns, 0, rows)
        self._program.run(rows, 0, len(self._program))
        return self._context[:rows].clone()

    def _add_product(self, index: int, linear: Linear, x: Tensor, out: Tensor) -> None:
        def used() -> tuple[Tensor, Tensor]:
            return x[: self._rows], out[: self._rows]

        add_product(self._program, self._products, index, linear, x, out, used)
