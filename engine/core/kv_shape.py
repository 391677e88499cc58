"""What keys and values look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.core.batch import BLOCK


@dataclass(frozen=True)
class KVShape:
    """The shape and dtype of a model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vnni: bool = False

    @property
    def dims(self) -> int:
        """head_dim, rounded up to a multiple of 16, or of 32 if vnni."""
        whole = 32 if self.vnni else 16
        return -(-self.head_dim // whole) * whole

    @property
    def block_bytes(self) -> int:
        of_number: int = self.dtype.itemsize
        return 2 * self.layers * self.kv_heads * self.dims * BLOCK * of_number
