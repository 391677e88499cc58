"""A tree whose nodes were rows of a forward, and whose tokens are drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.batch import BLOCK_SIZE, Int
from engine.core.tree import TokenTree
from engine.sampling.sampler import Sampler


@dataclass(frozen=True)
class DrawnTree:
    """A tree whose tokens are drawn on the device. first: the tree's first row of the logits, and of the hidden states.
    cache: where its rows' keys and values are; None if they are to stay where they are.
    """

    tree: TokenTree
    sampler: Sampler
    first: int
    cache: Any = None

    @property
    def moves(self) -> bool:
        """Whether a path that the logits alone decide is sure to be accepted: a grammar may rule a token out."""
        return self.cache is not None and not self.sampler.has_grammar

    @property
    def blocks(self) -> list[int]:
        """The blocks that are full once its longest path is committed."""
        if self.cache is None:
            return []
        first = self.cache.length
        end = first + 1 + int(self.tree.depths.max())
        filled: list[int] = self.cache.block_table[first // BLOCK_SIZE : end // BLOCK_SIZE].tolist()
        return filled

    @property
    def slots(self) -> Int:
        """[nodes]: where in the pool the nodes' keys and values are."""
        if self.cache is None:
            return np.zeros(len(self.tree), np.int32)
        slots: Int = self.cache.slots(np.arange(len(self.tree), dtype=np.int32) + np.int32(self.cache.length))
        return slots
