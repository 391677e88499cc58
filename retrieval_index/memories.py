"""Memories of answers, one for each owner of requests: nobody drafts from what another was answered."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

LEAST = 512
"""An owner's memory counts as at least this size, so that even an empty one has a price."""

Memory = TypeVar("Memory")


class Memories(Generic[Memory]):
    """One memory for each owner, of `capacity` in all; the least recently used are forgotten first. With a capacity of
    0 none is kept.

    Nothing is remembered of a request without an owner (None).
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._memories: OrderedDict[str, tuple[Memory, int]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, owner: str | None) -> Memory | None:
        """Return the owner's memory, and count this as a use; None if there is none."""
        if owner is None or owner not in self._memories:
            return None
        self._memories.move_to_end(owner)
        return self._memories[owner][0]

    def keep(self, owner: str | None, memory: Memory, size: int) -> None:
        """Keep the owner's memory, in place of an earlier one. The latest memory is kept whatever its size."""
        if owner is None or not self.capacity:
            return
        self._forget(owner)
        self._memories[owner] = memory, max(size, LEAST)
        self._size += max(size, LEAST)
        while self._size > self.capacity and len(self) > 1:
            self._forget(next(iter(self._memories)))

    def _forget(self, owner: str) -> None:
        if owner in self._memories:
            _, size = self._memories.pop(owner)
            self._size -= size
