"""Keys and values of one request of a model that attends through masks, in two buffers allocated once.

A forward writes its nodes after the committed positions; the verdict then moves the accepted path's entries together by
index. Nothing is concatenated or reallocated while decoding.

For CUDA graphs (`engine.model.cuda.graphs`) a cache is `fixed`: the slots to write come as a tensor, and attention sees
the whole buffers, in which the mask hides what does not belong to the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.core.errors import ModelError
from engine.model.cuda.graphs import Recorded


class MaskedCache(Cache):
    """Space for `capacity` positions in each of `layers` layers.

    `length`: committed positions. `pending`: entries after them that the next forward leaves alone (a tree's earlier
    levels, while a draft model grows it). keys, values: [layers, 1, kv_heads, capacity, head_dim], allocated at the
    first forward from the shapes that the model passes. slots: [nodes] int64, where a recorded forward writes.
    """

    def __init__(self, layers: int, capacity: int, fixed: bool = False):
        super().__init__(layers=[_KVLayer(self, index) for index in range(layers)])
        self.capacity, self.fixed = capacity, fixed
        self.slots: Tensor | None = None
        self.recorded: dict[tuple[int, ...], Recorded] = {}  # forwards over its buffers, by rows and feature layers
        self.length = 0
        self.pending = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make the buffers for states shaped like `keys` and `values`: [1, kv_heads, tokens, head_dim]."""
        make = torch.zeros if self.fixed else torch.empty  # masked slots are still read (0 x NaN = NaN)
        self.keys, self.values = (
            make((len(self.layers), *s.shape[:2], self.capacity, s.shape[3]), dtype=s.dtype, device=s.device)
            for s in (keys, values)
        )

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the entries of the last tree's nodes `path` (ascending) as the next committed positions."""
        self.pending = 0
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            assert self.keys is not None and self.values is not None
            source = torch.tensor(path[moved:], device=self.keys.device) + self.length
            start, end = self.length + moved, self.length + len(path)
            self.keys[..., start:end, :] = self.keys.index_select(3, source)
            self.values[..., start:end, :] = self.values.index_select(3, source)
        self.length += len(path)


class _KVLayer(CacheLayerMixin):
    """One attention layer's view of a MaskedCache."""

    is_croppable = False

    def __init__(self, cache: MaskedCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer itself holds nothing."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        cache = self.cache
        if cache.keys is None or cache.values is None:
            cache.allocate(key_states, value_states)
        assert cache.keys is not None and cache.values is not None
        keys, values = cache.keys[self.index], cache.values[self.index]
        if key_states.shape[1] != keys.shape[1] or key_states.shape[3] != keys.shape[3]:
            raise ModelError("model: its layers have keys of different shapes, which this cache cannot hold")
        if cache.slots is not None:
            return keys.index_copy_(2, cache.slots, key_states), values.index_copy_(2, cache.slots, value_states)
        start = cache.length + cache.pending
        end = start + key_states.shape[2]
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length + self.cache.pending

    def get_max_length(self) -> int:
        return self.cache.capacity
