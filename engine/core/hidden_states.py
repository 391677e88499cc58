"""The target's hidden states of one request, for a draft head: those not sent yet, and those of blocks to be shared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import BLOCK_SIZE

States = NDArray[np.uint16]
"""[positions, layers, hidden], the bits of bfloat16 numbers."""
NO_STATES: States = np.zeros((0, 0, 0), np.uint16)


class HiddenStates:
    """The hidden states of one request that a draft head wants. shared: whether blocks are shared at all. _kept: hidden
    states of the positions from `_begin` to `_end`, of which no block has been cached yet.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._unsent: list[States] = []
        self._kept: list[States] = []
        self._begin = self._end = 0

    def add(self, position: int, states: States, unsent: bool) -> None:
        """Add the states of the positions from `position` on, which were computed. unsent: the drafter
        has to get them.
        """
        if unsent:
            self._unsent.append(states)
        if not self._shared:
            return
        if position != self._end:
            self._kept, self._begin = [], position
        self._kept.append(states)
        self._end = position + len(states)

    def adopt(self, states: States) -> None:
        """Add the states of the next positions, which another request has computed."""
        self._unsent.append(states)

    def take(self) -> States:
        """Return the states that were not sent yet, in the order of their positions."""
        waiting, self._unsent = self._unsent, []
        if not waiting:
            return NO_STATES
        return waiting[0] if len(waiting) == 1 else np.concatenate(waiting)

    def of_block(self, index: int) -> States | None:
        """Return the states of the request's block of that index, or None if not all of them are known. Blocks are
        asked for in ascending order, each once.
        """
        start, end = index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE
        if start < self._begin or end > self._end:
            return None
        kept = self._kept[0] if len(self._kept) == 1 else np.concatenate(self._kept)
        # a view would hold all of a forward's states
        states: States = kept[start - self._begin : end - self._begin].copy()
        rest = kept[end - self._begin :]
        self._kept, self._begin = [rest.copy() if len(rest) < BLOCK_SIZE else rest], end
        return states
