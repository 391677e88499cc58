"""The context of a one-pass head on a CPU: the target's hidden states, fused and read by all layers in one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from drafters.layers import Linear
from drafters.stack import Stack
from engine.batch import Int
from engine.model.fused import ENTER, NORM, enter_kernel, norm_kernel
from engine.model.matmul import NO_SCRATCH, add_product, give_scratch, row_words
from engine.model.matmul_kernels import MATMUL
from engine.model.team import Program, address_of, words

if TYPE_CHECKING:
    from drafters.block import BlockHead

_MOST = 512  # rows of one run
_ALONE = 8  # rows that do not justify waking the other threads


class ContextReader:
    """Writes keys and values of the context to the pool of a head's stack."""

    def __init__(self, head: BlockHead, stack: Stack):
        self.stack, self.inputs, layers = stack, head.fc.inputs, len(head.layers)
        hidden, width, shape = stack.hidden, head.dtype.itemsize, stack.pool.shape
        self._delta, self._residual = torch.zeros(_MOST, hidden, dtype=head.dtype), torch.zeros(_MOST, hidden)
        self._features, self._context = (torch.zeros(_MOST, n, dtype=head.dtype) for n in (self.inputs, hidden))
        self._kv = torch.zeros(_MOST, head.layers[0].kv.outputs, dtype=head.dtype)
        self._scale = head.hidden_norm.weight.float().contiguous()
        self._norm, self._enters = np.zeros(1, NORM), np.zeros(layers, ENTER)
        self._norm["residual"], self._norm["delta"] = self._residual.data_ptr(), self._delta.data_ptr()
        self._norm["out"], self._norm["weight"] = self._context.data_ptr(), self._scale.data_ptr()
        self._norm["epsilon"], self._norm["hidden"] = float(head.hidden_norm.eps), hidden
        self._enters["qkv"], self._enters["kv_heads"] = self._kv.data_ptr(), shape.kv_heads
        self._enters["head_dim"] = self._enters["rotated"] = shape.head_dim
        self._enters["dims"], self._enters["paired"] = shape.dims, shape.paired
        self._norm["width"] = self._enters["width"] = width
        self._products = np.zeros(1 + layers, MATMUL)
        self._of_enter, self._of_products = (
            words(self._enters, "positions", "rows"),
            words(self._products, "rows", "tiles"),
        )
        self._scratch, self._scratch_of_products, self._rows = torch.zeros(0), NO_SCRATCH, 0
        self._scales: list[Tensor] = []  # the records point into these
        self._program = Program()
        self._add_product(0, head.fc, self._features, self._delta)
        self._program.add(norm_kernel(), address_of(self._norm), _ALONE)
        for index, layer in enumerate(head.layers):
            self._add_product(1 + index, layer.kv, self._context, self._kv)
            if layer.decoder.key_norm is not None:
                self._scales.append(layer.decoder.key_norm.weight.float().contiguous())
                self._enters["key_norm"][index] = self._scales[-1].data_ptr()
                self._enters["epsilon"][index] = float(layer.decoder.key_norm.eps)
            self._program.add(enter_kernel(), address_of(self._enters, index), _ALONE)

    def read(self, features: Tensor, positions: Sequence[int], slots: Sequence[Int]) -> Tensor:
        """The context, [n, hidden], of these features, [n, layers * hidden]. positions: [n]; slots: n places in the
        pool.
        """
        at, places = np.asarray(positions, np.int32), np.concatenate(slots)
        self.stack.reserve(1, int(at.max()) + 1)
        for index in range(len(self._enters)):
            self._enters["keys"][index], self._enters["values"][index] = self.stack.attention.layer_addresses(index)
        parts = [
            self._run(features[first : first + _MOST], at[first:], places[first:])
            for first in range(0, len(features), _MOST)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, features: Tensor, positions: Int, places: Int) -> Tensor:
        rows = self._rows = len(features)
        self._features[:rows], self._residual[:rows] = features, 0
        if self._scratch.numel() < (needed := torch.get_num_threads() * self.stack.pool.shape.dims):
            self._scratch = torch.zeros(needed)
        self._norm["count"] = rows
        self._of_products[:] = row_words(rows)
        self._scratch_of_products = give_scratch(self._products, self._scratch_of_products)
        addresses = positions.ctypes.data, places.ctypes.data, self.stack.turns.data_ptr()
        self._of_enter[:] = *addresses, 0, self._scratch.data_ptr(), rows
        self._program.run(rows, 0, len(self._program))
        return self._context[:rows].clone()

    def _add_product(self, index: int, linear: Linear, x: Tensor, out: Tensor) -> None:
        add_product(self._program, self._products, index, linear, x, out, lambda: (x[: self._rows], out[: self._rows]))
