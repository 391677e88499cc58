"""The kernel between a head's products and its attention, for draft heads on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from drafters.heads.layers import DecoderLayer
from engine.kernels.fused import ENTER
from engine.kernels.threads import address_of, words
from engine.model.kv_pool import KVPool


class Enter:
    """The kernel that writes keys and values of each layer to the pool, and lays out queries.

    qkv: [capacity, (groups + 2) * kv_heads * head_dim], what the layers' products made; groups: query heads for each
    head of keys, 0 for none.
    """

    def __init__(self, pool: KVPool, layers: Sequence[DecoderLayer], qkv: Tensor, groups: int):
        self.pool, shape = pool, pool.shape
        self._records, self._scales = np.zeros(len(layers), ENTER), list[Tensor]()  # the records point into these
        constant = {"qkv": qkv.data_ptr(), "groups": groups, "kv_heads": shape.kv_heads, "paired": shape.paired}
        sizes = {"head_dim": shape.head_dim, "rotated": shape.head_dim, "dims": shape.dims, "width": qkv.itemsize}
        for name, value in (constant | sizes).items():
            self._records[name] = value
        for record, layer in zip(self._records, layers, strict=True):
            for name, norm in (("query_norm", layer.query_norm), ("key_norm", layer.key_norm)):
                if norm is not None:
                    self._scales.append(norm.weight.float().contiguous())
                    record[name], record["epsilon"] = self._scales[-1].data_ptr(), float(norm.eps)
        self._of_batch, self._scratch, self._blocks = words(self._records, "positions", "rows"), torch.zeros(0), 0

    def address(self, layer: int) -> int:
        """The address of a layer's record."""
        return address_of(self._records, layer)

    def begin(self, positions: int, slots: int, turns: Tensor, queries: int, rows: int) -> None:
        """Set the batch: addresses of its positions, slots and queries, and its rotary turns."""
        if self._blocks != self.pool.blocks:
            self._blocks = self.pool.blocks
            for layer, record in enumerate(self._records):
                record["keys"], record["values"] = self.pool.addresses(layer)
        if self._scratch.numel() < (needed := torch.get_num_threads() * self.pool.shape.dims):
            self._scratch = torch.zeros(needed)
        self._of_batch[:] = positions, slots, turns.data_ptr(), queries, self._scratch.data_ptr(), rows
