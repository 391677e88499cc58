"""Rows of a batch as tensors of few different shapes, as CUDA graphs need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import BLOCK, Batch, Int
from engine.model.cuda import triton_attention
from engine.model.cuda.graphs import bucket
from engine.model.cuda.triton_attention import DeviceRows, grouped

_LEAST_LISTED = 4096  # a tree seldom lists more ancestors, so their number is nearly always the same


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
    where. prefix_lens: [rows]; ancestor_ptr: [rows + 1]; ancestor_slots: [capacity]; see `engine.core.batch.Batch`.
    tables: [rows, blocks], a table for each row, so that the size depends only on the blocks; table_of: [rows] where it
    begins. firsts: [rows + 1] where each group of rows begins, which attention reads a text for.
    """

    tokens: Tensor
    positions: Tensor
    sources: Tensor
    blocks: Tensor
    lanes: Tensor
    prefix_lens: Tensor
    ancestor_ptr: Tensor
    ancestor_slots: Tensor
    tables: Tensor
    table_of: Tensor
    firsts: Tensor

    @classmethod
    def of(
        cls, batch: Batch, first: int, end: int, size: int, together: Callable[[int, int], int]
    ) -> tuple[PaddedRows, int]:
        """Rows `first` to `end` of the batch, padded to `size`, and the number of attention chunks that they need.
        together: see `TritonAttention.together`.

        A padding row repeats the last row. It stores the last row's key and value again, so it changes nothing, and it
        sees only its text's first position, so it costs little.
        """
        sources = np.minimum(np.arange(size), end - first - 1)
        rows = first + sources
        begins = batch.ancestor_ptr[np.minimum(first + np.arange(size + 1), end)]
        ancestors = batch.ancestor_slots[begins[0] : begins[-1]]
        prefix_lens = batch.prefix_lens[rows]
        prefix_lens[end - first :] = 1
        reach = max(int(batch.prefix_lens[first:end].max()), 1 + int(ancestors.max(initial=0)))
        chunks = bucket(-(-reach // triton_attention.CHUNK))
        width = chunks * triton_attention.CHUNK // BLOCK
        # entries past the end of a request's own table are arbitrary: no row reads them
        places = np.minimum(batch.table_of[rows][:, None] + np.arange(width), len(batch.tables) - 1)
        indexes = batch.tokens[rows], batch.positions[rows], sources, *np.divmod(batch.slots[rows], BLOCK)
        tables = batch.tables[places], np.arange(0, size * width, width)
        groups = grouped(batch.table_of[rows], together(size, chunks))
        seen = prefix_lens, begins - begins[0], _filled(ancestors), *tables, groups
        return cls(*map(longs, indexes), *(torch.from_numpy(array.astype(np.int32)) for array in seen)), chunks

    @property
    def seen(self) -> DeviceRows:
        """What attention reads of it."""
        return DeviceRows(
            self.prefix_lens, self.ancestor_ptr, self.ancestor_slots, self.tables, self.table_of, self.firsts
        )


def _filled(ancestors: Int) -> Int:
    """Padded with zeros."""
    ancestor_slots = np.zeros(max(_LEAST_LISTED, bucket(max(1, len(ancestors)))), np.int32)
    ancestor_slots[: len(ancestors)] = ancestors
    return ancestor_slots


def longs(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
