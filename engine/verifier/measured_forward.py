"""Forwards run at start-up to measure their time."""

from __future__ import annotations

import time
from typing import Any

from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.tree import TokenTree
from engine.device import wait
from engine.model.target import Target

BESIDE = 8  # minimum positions before the rows
_CHILDREN = 4  # of a node: rows of a tree read their own ancestors, which takes a GPU longer than a chain


class MeasuredForward:
    """seconds(rows, past) of a forward over a tree. most: maximum rows.

    A forward's time depends on the length of the text, not on its tokens, so one token's keys and values are copied.
    """

    def __init__(self, target: Target, most: int):
        self._target, self._most = target, most
        self._past = 0
        self._cache: Any = None

    @property
    def longest(self) -> int:
        """The most past positions that a forward can run after."""
        room = self._target.context // 2
        if self._target.pool is not None:
            room = min(room, self._target.pool.blocks * BLOCK_SIZE - self._most)
        return max(0, room - BESIDE)

    def seconds(self, rows: int, past: int) -> float:
        """Time of a forward over a tree of `rows` nodes after a text of `past` positions."""
        cache = self._cache_after(min(past, self.longest) + BESIDE)
        parents = [-1, *(node // _CHILDREN for node in range(rows - 1))]
        tree = Segment.of_tree(TokenTree.from_lists([0] * rows, parents, [1.0] * rows), cache)
        started = time.perf_counter()
        self._target.run([tree])
        wait(self._target.device)
        return time.perf_counter() - started

    def close(self) -> None:
        """Release the text's cache."""
        if self._cache is not None:
            self._target.release(self._cache)
        self._past, self._cache = 0, None

    def _cache_after(self, past: int) -> Any:
        if past != self._past:
            self.close()
            self._past, self._cache = past, self._target.new_cache(self._most + past)
            self._target.run([Segment.of_tree(TokenTree.root_only(0), self._cache)])
            self._cache.commit([0] * past)
        return self._cache
