"""A matrix in memory, in the tiles that `engine.kernels.gemm.matmul` reads: packed from a file's blocks, held once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.large_pages import in_large_pages
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quantised import Form
from engine.kernels.simd import LANES

STEP = 32
"""Inputs of a tile of bfloat16."""


class TiledMatrix:
    """tiles: [panels, steps, bytes] uint8, a panel of 16 outputs. Outputs and inputs are filled up with zeros."""

    def __init__(self, layout: Form, tiles: Tensor, outputs: int, inputs: int):
        self.layout, self.tiles = layout, tiles
        self.outputs, self.inputs = outputs, inputs

    @classmethod
    def pack(cls, parts: Sequence[StoredMatrix]) -> TiledMatrix:
        """One matrix of the outputs of several of the same type."""
        weight = torch.cat([part.values() for part in parts])
        outputs, inputs = weight.shape
        panels, steps = -(-outputs // LANES), -(-inputs // STEP)
        full = weight.new_zeros(panels * LANES, steps * STEP)
        full[:outputs, :inputs] = weight
        tiles = full.view(panels, LANES, steps, STEP // 2, 2).permute(0, 2, 3, 1, 4)
        return cls(Form.BFLOAT16, in_large_pages(tiles).flatten(2).view(torch.uint8), outputs, inputs)

    @property
    def bytes(self) -> int:
        """Bytes of memory that it takes."""
        taken: int = self.tiles.nbytes
        return taken

    def rows(self, indices: Tensor) -> Tensor:
        """[indices, inputs] bfloat16: these outputs, as an embedding is read."""
        panels, lanes = indices // LANES, indices % LANES
        pairs = self.tiles.view(torch.bfloat16).unflatten(2, (STEP // 2, LANES, 2))[panels, :, :, lanes]
        return pairs.flatten(1)[:, : self.inputs]
