"""Rows of a batch as tensors of few different shapes, as CUDA graphs need them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Batch, Int
from engine.model.cuda.device_rows import DeviceRows
from engine.model.cuda.triton_attention import TritonAttention


class Places(Protocol):
    """Where rows store their keys and values: see `PaddedRows`."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def sources(self) -> Tensor: ...
    @property
    def blocks(self) -> Tensor: ...
    @property
    def lanes(self) -> Tensor: ...


class PaddedRows(NamedTuple):
    """Rows of a batch, padded to one of a few numbers of rows with copies of the last one, as tensors.

    tokens, positions: [rows]. sources: [rows] the row whose key and value this one stores; blocks, lanes: [rows]
    where. The others are what attention reads: see `DeviceRows`. `listed` is as long as the batch needs, and all else
    depends on the number of rows alone.
    """

    tokens: Tensor
    positions: Tensor
    sources: Tensor
    blocks: Tensor
    lanes: Tensor
    prefix_lens: Tensor
    ancestor_ptr: Tensor
    table_of: Tensor
    firsts: Tensor
    pairs: Tensor
    parts: Tensor
    listed: Tensor

    @classmethod
    def of(cls, batch: Batch, first: int, end: int, size: int, attention: TritonAttention) -> PaddedRows:
        """Return rows `first` to `end` of the batch, padded to `size`.

        A padding row stores the last row's key and value again, so it changes nothing, and it sees nothing.
        """
        count = end - first
        sources = np.minimum(np.arange(size), count - 1)
        rows = first + sources
        begins = batch.ancestor_ptr[np.minimum(first + np.arange(size + 1), end)]
        prefix_lens = batch.prefix_lens[rows]
        prefix_lens[count:] = 0
        tables = batch.tables[batch.table_of[first] : table_ends(batch)[end - 1]]
        table_of = batch.table_of[rows] - batch.table_of[first]
        chunks = attention.chunks_of(prefix_lens[:count], np.diff(begins[: count + 1]))
        work = attention.work(table_of[:count], chunks, size)
        listed = np.concatenate([tables, batch.ancestor_slots[begins[0] : begins[-1]]])
        indexes = batch.tokens[rows], batch.positions[rows], sources, *np.divmod(batch.slots[rows], BLOCK_SIZE)
        seen = prefix_lens, begins - begins[0] + len(tables), table_of, *work, listed
        return cls(*map(longs, indexes), *(torch.from_numpy(array.astype(np.int32)) for array in seen))

    @property
    def seen(self) -> DeviceRows:
        """The parts that attention reads."""
        return DeviceRows(*self[5:])


def table_ends(batch: Batch) -> Int:
    """Return [rows]: where in the batch's tables the one of each row's request ends."""
    ends = np.cumsum([len(table) for table in batch.tables_of])
    return np.repeat(ends, [end - first for first, end in batch.spans]).astype(np.int32)


def longs(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
