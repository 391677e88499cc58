"""The target's hidden states of one request, for a draft head: those not sent yet, and those of blocks to be shared.

On a GPU they stay there if the drafter can take them from there. They are then views of what a round gathered for all
of its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import BLOCK_SIZE

HostStates: TypeAlias = NDArray[np.uint16]
"""[positions, layers, hidden], the bits of bfloat16 numbers."""
States: TypeAlias = HostStates | Tensor
"""The same, or the numbers themselves on a device."""
NO_STATES: HostStates = np.zeros((0, 0, 0), np.uint16)
_MOST_VIEWS = 64  # pieces on a device that are held before they are joined: a view holds what all requests have


class HiddenStates:
    """The hidden states of one request that a draft head wants. shared: whether blocks are shared at all. _kept: hidden
    states of the positions from `_begin` to `_end`, of which no block has been cached yet.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._held: list[States] = []  # not sent either, and before `_unsent`
        self._unsent: list[States] = []
        self._kept: list[States] = []
        self._begin = self._end = 0

    def add(self, position: int, states: States, unsent: bool) -> None:
        """Add the states of the positions from `position` on, which were computed. unsent: the drafter
        has to get them.
        """
        if unsent:
            self.adopt(states)
        if not self._shared:
            return
        if position != self._end:
            self._kept, self._begin = [], position
        self._kept.append(states)
        self._end = position + len(states)

    def adopt(self, states: States) -> None:
        """Add the states of the next positions, which another request has computed, to those not sent yet."""
        self._unsent.append(states)
        if len(self._unsent) == _MOST_VIEWS and isinstance(states, Tensor):
            self._held.append(_joined(self._unsent))
            self._unsent = []

    def take(self) -> States:
        """Return the states that were not sent yet, in the order of their positions."""
        waiting, self._held, self._unsent = [*self._held, *self._unsent], [], []
        return _joined(waiting) if waiting else NO_STATES

    def of_block(self, index: int) -> States | None:
        """Return the states of the request's block of that index, or None if not all of them are known. Blocks are
        asked for in ascending order, each once.
        """
        start, end = index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE
        if start < self._begin or end > self._end:
            return None
        _, kept = _split(self._kept, start - self._begin)
        of_block, rest = _split(kept, BLOCK_SIZE)
        if sum(map(len, rest)) < BLOCK_SIZE < len(kept[-1]):  # a view would hold all of a forward's states
            rest = [_copied(part) for part in rest]
        self._kept, self._begin = rest, end
        return _joined(of_block) if len(of_block) > 1 else _copied(of_block[0])


def _joined(parts: Sequence[States]) -> States:
    """Join states that are all on the host or all on a device."""
    if len(parts) == 1:
        return parts[0]
    on_device = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(on_device) if on_device else np.concatenate(parts)


def _split(parts: Sequence[States], at: int) -> tuple[list[States], list[States]]:
    """Split what the parts are together into what is before a position and what is behind it."""
    before, after = list[States](), list[States]()
    for part in parts:
        count = min(max(at, 0), len(part))
        before += [part[:count]] if count else []
        after += [part[count:]] if count < len(part) else []
        at -= len(part)
    return before, after


def _copied(states: States) -> States:
    return states.clone() if isinstance(states, Tensor) else states.copy()
