"""The keys and values of the layers of one shape, in blocks: the numbers themselves. Which block is whose is the
business of `engine.model.kv_pool`.

Layout: keys [layers, blocks, kv_heads, dims, 16], so that 16 keys are read at once, and values [layers, blocks,
kv_heads, 16, dims]; dims is the head size rounded up to a multiple of 16, padded with zeros. Paired, for instructions
that multiply pairs of bfloat16: a block's keys are [dims / 2, 16, 2], its values [dims / 16, 8, 16, 2] with the pairs
of neighbouring positions, and dims is a multiple of 32. In codes of 8 bits, both are [layers, blocks, kv_heads, bytes]:
`engine.kernels.attention.kv_codes` says what these hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Int
from engine.core.kv_shape import KVShape
from engine.device import uploaded
from engine.kernels.attention.finite_blocks import FiniteBlocks
from engine.kernels.attention.kv_codes import decoded, move_codes_kernel
from engine.kernels.attention.kv_slots import MOVE, move_kernel
from engine.kernels.simd import LANES


class KVPart:
    """`blocks` blocks. On a CPU, a block takes memory when it is first written; on a GPU, all do at once."""

    def __init__(self, shape: KVShape, blocks: int, device: torch.device):
        self.shape, self.blocks = shape, blocks
        sizes = [(shape.head_bytes,)] * 2 if shape.q8_0 else [(shape.dims, BLOCK_SIZE), (BLOCK_SIZE, shape.dims)]
        dtype, of_part = torch.uint8 if shape.q8_0 else shape.dtype, (shape.layers, blocks, shape.kv_heads)
        self.keys, self.values = (_untouched((*of_part, *size), dtype, device) for size in sizes)
        self._finite = FiniteBlocks(shape, blocks, *self.addresses(0)) if device.type == "cpu" else None

    def addresses(self, layer: int) -> tuple[int, int]:
        """Return the addresses of the layer's keys and values."""
        keys, values = (part.data_ptr() + layer * part.stride(0) * part.itemsize for part in (self.keys, self.values))
        return keys, values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer at these slots, [slots, kv_heads, head_dim] each, those in codes as
        float32.
        """
        if self.shape.q8_0:
            keys, values = self.keys[layer].numpy(), self.values[layer].numpy()
            both = decoded(keys, values, slots.numpy(), self.shape.dims)
            found = [torch.from_numpy(part) for part in both]
        else:
            found = [entries[place].flatten(2) for entries, place in self._entries(layer, slots)]
        return found[0][..., : self.shape.head_dim], found[1][..., : self.shape.head_dim]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values as `read` returns them, in a part of numbers."""
        for (entries, place), numbers in zip(self._entries(layer, slots), (keys, values), strict=True):
            whole = F.pad(numbers, (0, self.shape.dims - self.shape.head_dim)).to(entries.dtype)
            entries[place] = whole.view(len(slots), *entries.shape[len(place) :])

    def _entries(self, layer: int, slots: Tensor) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """Return a layer's keys as [blocks, lanes, kv_heads, ...] numbers, and where in them these slots are; and its
        values.
        """
        keys, values = self.keys[layer], self.values[layer]
        block, lane = slots.long() // BLOCK_SIZE, slots.long() % BLOCK_SIZE
        if not self.shape.vnni:
            return [(keys.permute(0, 3, 1, 2), (block, lane)), (values.permute(0, 2, 1, 3), (block, lane))]
        paired = keys.view(*keys.shape[:2], -1, BLOCK_SIZE, 2).permute(0, 3, 1, 2, 4)
        pairs = values.view(*values.shape[:2], -1, BLOCK_SIZE // 2, LANES, 2).permute(0, 3, 5, 1, 2, 4)
        return [(paired, (block, lane)), (pairs, (block, lane // 2, lane % 2))]

    def finite(self, blocks: Sequence[int]) -> list[bool]:
        """Return whether each block's keys and values are all finite."""
        return finite_by_index(self.keys, self.values, blocks) if self._finite is None else self._finite(blocks)

    def move(self, sources: Int, places: Int) -> None:
        """Copy keys and values from slots to other slots. No place is the source of a later copy."""
        if self.keys.device.type != "cpu":
            move_by_index(self.keys, self.values, sources, places)
            return
        shape, work = self.shape, np.zeros(1, MOVE)
        record = work[0]
        record["keys"], record["values"] = self.keys.data_ptr(), self.values.data_ptr()
        record["sources"], record["places"], record["count"] = sources.ctypes.data, places.ctypes.data, len(sources)
        record["layers"], record["blocks"], record["kv_heads"] = shape.layers, self.blocks, shape.kv_heads
        record["dims"], record["width"], record["vnni"] = shape.dims, shape.dtype.itemsize, shape.vnni
        kernel = move_codes_kernel() if shape.q8_0 else move_kernel()
        kernel(work.ctypes.data, shape.layers)


@torch.inference_mode()  # the mode in which a target makes its pool
def move_by_index(keys: Tensor, values: Tensor, sources: Int, places: Int) -> None:
    """Move keys and values as `KVPart.move` does, on any device."""
    indexes = np.stack([*np.divmod(sources, BLOCK_SIZE), *np.divmod(places, BLOCK_SIZE)]).astype(np.int64)
    ((old, old_lane, new, new_lane),) = uploaded([torch.from_numpy(indexes)], keys.device)
    keys[:, new, :, :, new_lane] = keys[:, old, :, :, old_lane]
    values[:, new, :, new_lane] = values[:, old, :, old_lane]


def finite_by_index(keys: Tensor, values: Tensor, blocks: Sequence[int]) -> list[bool]:
    """Return what `KVPart.finite` returns, on any device, with one wait for all blocks."""
    found: list[bool] = finite_flags(keys, values, blocks).tolist()
    return found


@torch.inference_mode()
def finite_flags(keys: Tensor, values: Tensor, blocks: Sequence[int]) -> Tensor:
    """Find on the device what `KVPart.finite` returns, [blocks] bool, without a wait."""
    (index,) = uploaded([torch.tensor(blocks, dtype=torch.int64)], keys.device)
    of_parts = [part.index_select(1, index).isfinite().movedim(1, 0).flatten(1).all(1) for part in (keys, values)]
    return of_parts[0] & of_parts[1]


def _untouched(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no CPU memory until they are written; `torch.zeros` would touch all of it."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    bytes_of: int = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(bytes_of, np.uint8)).view(dtype).view(size)
