"""What a forward gave for a round's trees and chunks, as the host reads it.

On a GPU every result that is read waits for the device, so all of a round is drawn, gathered and sent to the host in
one piece, which is launched behind the forward (`engine.model.cuda.receipt`). On a CPU the walk down a tree draws at
the nodes that it reaches, and nothing is computed before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.core.drafter_protocol import DeviceVerdicts, OnItsWay
from engine.core.hidden_states import States
from engine.device import uploaded, wait
from engine.model.kv_pool import KVPool
from engine.model.runner import bfloat16_bits
from engine.sampling.argmax import argmax
from engine.sampling.drawn_tree import DrawnTree
from engine.wire.messages import Array

if TYPE_CHECKING:
    from engine.model.cuda.receipt import Receipt

_SMALL = 8  # nodes of a tree of which the argmax is found without knowing whether it is needed

Known = Sequence[int] | None
"""[nodes] the token drawn at each node of a tree (`engine.sampling.sampler.LogitsView`), if that is known."""


class RowsOnHost:
    """Reads what is there when it is asked for, hidden states on the host. The arguments are those of
    `engine.model.cuda.receipt.Receipt`. roots, on_device: None, since the host draws.
    """

    roots: Tensor | None = None
    on_device: DeviceVerdicts | None = None

    def __init__(
        self, trees: Sequence[DrawnTree], logits: Tensor, states: Tensor | None, rows: int = 0, successors: int = 0
    ):
        self._trees, self._logits, self._states = trees, logits, states
        self._rows, self._successors = rows, successors

    def wait(self, behind: OnItsWay | None = None) -> float:
        """Wait for the end of the forward, behind which nothing is launched."""
        wait(self._logits.device)
        return 0.0

    def known(self, index: int) -> Known:
        """Return what is drawn at each node of the tree of that index, if one call finds it for all trees: a call takes
        longer than a row's argmax. But of a large tree few nodes are drawn from, and the others' logits need not be
        read.
        """
        one = self._trees[index]
        if one.first >= self._rows or not one.sampler.params.greedy or self._best is None:
            return None
        return self._best[one.first : one.first + len(one.tree)]

    @cached_property
    def _best(self) -> list[int] | None:
        trees = sum(one.first < self._rows for one in self._trees)
        if self._logits.device.type == "cpu" and self._rows > _SMALL * trees:
            return None
        return argmax(self._logits[: self._rows])

    def states_of(self, index: int, path: Sequence[int]) -> States | None:
        """Return [path, layers, hidden] of the nodes on the accepted path of the tree of that index."""
        if self._states is None:
            return None
        rows = self._trees[index].first + np.asarray(path, np.int64)
        if self._states.device.type == "cpu":
            return self._bits[rows]
        return bfloat16_bits(self._states.index_select(0, *uploaded([torch.from_numpy(rows)], self._states.device)))

    @cached_property
    def _bits(self) -> States:
        assert self._states is not None
        return bfloat16_bits(self._states[: self._rows])

    def read_states(self, first: int, count: int) -> States | None:
        """Return [count, layers, hidden] of rows of prompts, from `first` on."""
        return None if self._states is None else bfloat16_bits(self._states[first : first + count])

    def successors_of(self, first: int, count: int) -> Array | None:
        """Return [count, successors] int32: the likeliest tokens of a tree's rows, from `first` on."""
        if not self._successors:
            return None
        ranked: Array = self._logits[first : first + count].topk(self._successors).indices.int().cpu().numpy()
        return ranked


Output: TypeAlias = "RowsOnHost | Receipt"


def output_of(
    trees: Sequence[DrawnTree],
    logits: Tensor,
    states: Tensor | None,
    pool: KVPool | None,
    rows: int = 0,
    successors: int = 0,
    states_stay: bool = False,
) -> Output:
    """Take what a forward gave. The arguments are those of `engine.model.cuda.receipt.Receipt`."""
    if logits.device.type != "cpu" and pool is not None:  # a pool on a GPU means that Triton's kernels have run there
        from engine.model.cuda.receipt import Receipt

        return Receipt(trees, logits, states, pool, rows, successors, states_stay)
    return RowsOnHost(trees, logits, states, rows, successors)
