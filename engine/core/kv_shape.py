"""What keys and values look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.core.batch import BLOCK_SIZE

CODE_GROUP = 32
"""The number of neighbouring dimensions of codes that share a scale."""
_SCALE_BYTES = 2


@dataclass(frozen=True)
class KVShape:
    """The shape and dtype of a model's keys and values.

    vnni: attention multiplies pairs of bfloat16, and numbers are kept in pairs. q8_0: numbers are kept as codes of 8
    bits, in groups of 32 dimensions with one scale, as in GGUF's type of that name.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vnni: bool = False
    q8_0: bool = False

    @property
    def kind(self) -> str:
        """The name of the form in which numbers are kept."""
        return "q8_0" if self.q8_0 else str(self.dtype).removeprefix("torch.")

    @property
    def dims(self) -> int:
        """head_dim, rounded up to a multiple of 16, or of 32 if vnni or q8_0."""
        whole = CODE_GROUP if self.vnni or self.q8_0 else 16
        return -(-self.head_dim // whole) * whole

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's keys in a block, and of its values."""
        if self.q8_0:
            return BLOCK_SIZE * (self.dims + self.dims // CODE_GROUP * _SCALE_BYTES)
        of_number: int = self.dtype.itemsize
        return BLOCK_SIZE * self.dims * of_number

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_bytes
