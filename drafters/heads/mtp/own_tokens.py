"""The tokens that a head drafts over: the likeliest of the vocabulary, and those that texts have had.

A tokenizer's numbers follow its merges, so low ones are the frequent ones: the lowest 32,000 of Qwen2.5's 151,936 cover
91% to 95% of the tokens of English text and of code. Rare words of a text come again in it: with the tokens that it has
had before, 95% to 98% are covered. So the last columns of the output matrix are given to tokens that enter the head and
are not drafted yet, in turn; 16 of them are one panel, which is packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.gemm.product import Product
from engine.kernels.quant.pack import Panel
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.simd import LANES

_MOST = 1024
_SHARE = 4  # at most one of so many drafted tokens

RowsOf = Callable[[NDArray[np.int64]], StoredMatrix]
"""The rows of the output matrix of these tokens."""


def likely_tokens(vocabulary: int, most: int, ends: set[int]) -> tuple[list[int], int]:
    """Return the tokens that are drafted at first, and how many of them stay in use: the lowest ids, and the tokens
    that end an answer. The ids behind these descend, so that outputs are never numbered as tokens are.
    """
    count = min(most, vocabulary)
    lowest = [token for token in range(vocabulary) if token not in ends][: max(0, count - len(ends))]
    if count == vocabulary:
        return sorted([*lowest, *ends]), count
    stay = max(count - min(_MOST, count // _SHARE), len(ends) + LANES - 1) // LANES * LANES
    fixed = max(0, stay - len(ends))
    return [*sorted([*lowest[:fixed], *ends]), *reversed(lowest[fixed:])], stay


class OwnTokens:
    """head: the product with the rows of `target_ids`, of which those from `stay` on are replaced, in both."""

    def __init__(self, head: Product, rows_of: RowsOf, target_ids: Tensor, stay: int):
        assert head.matmul is not None
        (self._tiled,) = head.matmul.tiled
        self.target_ids, self._rows_of, self._stay = target_ids, rows_of, stay
        self._drafted = set(target_ids.tolist())
        self._next = stay

    def enter(self, tokens: Iterable[int]) -> None:
        """Draft these tokens too from now on."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._drafted]
        if new and (places := len(self.target_ids) - self._stay) > 0:
            self._replace(new[-places:])

    def _replace(self, new: Sequence[int]) -> None:
        count, panels = len(self.target_ids), set[int]()
        for token in new:
            place, self._next = self._next, self._next + 1 if self._next + 1 < count else self._stay
            self._drafted.discard(int(self.target_ids[place]))
            self._drafted.add(token)
            self.target_ids[place] = token
            panels.add(place // LANES)
        for panel in sorted(panels):
            ids = self.target_ids[LANES * panel : LANES * (panel + 1)].numpy()
            packed = TiledMatrix([Panel(self._rows_of(ids), 0)], self._tiled.code_layout)
            self._tiled.tiles[panel].copy_(packed.tiles[0])
