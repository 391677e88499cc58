"""The context of a one-pass head on a CPU: the target's hidden states, fused and read by all layers in one program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.heads.layers import DecoderLayer, Linear, RMSNorm
from drafters.heads.stack import Stack, StackLayer, norm_of
from engine.core.batch import Int
from engine.kernels.attention.attention import Attention, LayerKeys, Rule
from engine.kernels.layer.program import LayerProgram

_MOST = 512  # rows of one run


class ContextReader:
    """Computes the head's keys and values for the target's hidden states and writes them to the stack's pool. `fc` and
    `norm` project the hidden states; `layers` pairs each layer with its KV projection.
    """

    def __init__(self, stack: Stack, fc: Linear, norm: RMSNorm, layers: Sequence[tuple[DecoderLayer, Linear]]):
        self.stack, self.fc, self.norm = stack, fc, norm
        self.layers = [StackLayer(kv, decoder, None) for decoder, kv in layers]
        self._program = self._new_program()

    def read(self, features: Tensor, positions: Sequence[int], places: Int) -> None:
        """Read these features, [n, layers * hidden], into the pool, and keep the context that they make in their slots.
        positions: [n]; places: [n] slots of the pool.
        """
        at = np.asarray(positions, np.int32)
        self.stack.reserve_positions(int(at.max()) + 1)
        if self._blocks != self.stack.pool.blocks:
            self._program = self._new_program()
        for first in range(0, len(features), _MOST):
            self._run(features[first : first + _MOST], at[first:], places[first:])

    def _run(self, features: Tensor, positions: Int, places: Int) -> None:
        program, rows = self._program, len(features)
        program.buffers["features"][:rows], program.residual[:rows] = features, 0  # the norm adds what was fused to it
        program.begin(rows, positions.ctypes.data, places.ctypes.data, [self.stack.cos_sin])
        program.run()
        kept = torch.from_numpy(places[:rows].astype(np.int64))
        self.stack.pool.features[kept] = program.buffers["x"][:rows].float()

    def _new_program(self) -> LayerProgram:
        """Return the program for all blocks that the pool has now."""
        self._blocks, keys_alone = self.stack.pool.blocks, Attention(self.stack.pool, 0)
        program = LayerProgram([keys_alone], _MOST, self.stack.hidden, self.stack.dtype, len(self.layers))
        program.buffer("features", self.fc.inputs)
        program.product(self.fc, "features", "delta", self.stack.hidden)
        program.delta()
        program.norm(norm_of(self.norm))
        for index, layer in enumerate(self.layers):
            program.product(layer.qkv, "x", "kv", layer.qkv.outputs)
            program.enter(LayerKeys(keys_alone, index, Rule(1.0)), "kv", layer.attention)
        return program
