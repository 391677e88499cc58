"""Keys and values of all requests in blocks of 16 positions, in one pool.

A request has a table of blocks; blocks are counted references, so that requests whose texts begin alike can share
them. Layout: keys [layers, blocks, kv_heads, dims, 16], so that 16 keys are read at once, and values [layers, blocks,
kv_heads, 16, dims]; dims is the head size rounded up to a multiple of 16, filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import BLOCK, Int
from engine.errors import OutOfBlocks
from engine.model.fused import MOVE, move_kernel


@dataclass(frozen=True)
class KVShape:
    """What the keys and values of a model need."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def dims(self) -> int:
        """head_dim, rounded up to a multiple of 16."""
        return -(-self.head_dim // 16) * 16

    @property
    def block_bytes(self) -> int:
        of_number: int = self.dtype.itemsize
        return 2 * self.layers * self.kv_heads * self.dims * BLOCK * of_number


class KVPool:
    """`blocks` blocks. Memory is taken from the system when a block is first written."""

    def __init__(self, shape: KVShape, blocks: int):
        self.shape, self.blocks = shape, blocks
        of_block = shape.kv_heads, shape.dims, BLOCK
        self.keys = (
            torch.from_numpy(
                np.zeros(shape.layers * blocks * shape.kv_heads * shape.dims * BLOCK * shape.dtype.itemsize, np.uint8)
            )
            .view(shape.dtype)
            .view(shape.layers, blocks, *of_block)
        )  # no memory until written, unlike torch.zeros
        self.values = (
            torch.from_numpy(np.zeros(self.keys.nbytes, np.uint8))
            .view(shape.dtype)
            .view(shape.layers, blocks, of_block[0], BLOCK, shape.dims)
        )
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many blocks, or OutOfBlocks and none."""
        if count > len(self._free):
            raise OutOfBlocks(f"verifier.kv_memory: {count} more blocks are needed and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            self._references[block] += 1

    def give(self, blocks: Sequence[int]) -> None:
        """One holder less of each; what nobody holds is free."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def move(self, sources: Int, places: Int) -> None:
        """Copy keys and values from slots to other slots, in their order."""
        shape, work = self.shape, np.zeros(1, MOVE)
        record = work[0]
        record["keys"], record["values"] = self.keys.data_ptr(), self.values.data_ptr()
        record["sources"], record["places"], record["count"] = sources.ctypes.data, places.ctypes.data, len(sources)
        record["layers"], record["blocks"], record["kv_heads"] = shape.layers, self.blocks, shape.kv_heads
        record["dims"], record["width"] = shape.dims, shape.dtype.itemsize
        move_kernel()(work.ctypes.data, shape.layers)


class KVCache:
    """One request's keys and values. length: committed positions; pending: rows behind them that are still drafts."""

    def __init__(self, pool: KVPool):
        self.pool = pool
        self.length = self.pending = 0
        self.table: Int = np.zeros(0, np.int32)

    @property
    def capacity(self) -> int:
        """Positions it has blocks for."""
        return len(self.table) * BLOCK

    def reserve(self, positions: int) -> None:
        """Have blocks for so many positions; OutOfBlocks if there are not enough."""
        missing = -(-positions // BLOCK) - len(self.table)
        if missing > 0:
            self.table = np.concatenate([self.table, np.asarray(self.pool.take(missing), np.int32)])

    def commit(self, path: Sequence[int]) -> None:
        """Keep the entries of the last tree's nodes `path` (ascending) as the next committed positions."""
        self.pending = 0
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved < len(path):
            sources = np.asarray(path[moved:], np.int32) + np.int32(self.length)
            places = np.arange(self.length + moved, self.length + len(path), dtype=np.int32)
            self.pool.move(self._slots(sources), self._slots(places))
        self.length += len(path)

    def release(self) -> None:
        """Give the blocks back."""
        self.pool.give(self.table.tolist())
        self.table = np.zeros(0, np.int32)
        self.length = self.pending = 0

    def _slots(self, positions: Int) -> Int:
        slots: Int = self.table[positions // BLOCK] * np.int32(BLOCK) + positions % np.int32(BLOCK)
        return slots
