"""Snapshots in a cache folder. The key of one is the key of the block that its text ends with (`saved.blocks`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.files.cache_folder import CacheFolder

_STATES = "snapshots"


class SavedStates:
    """The snapshots of one pool of states in a cache folder. states: the pool's, [slots, bytes]."""

    def __init__(self, folder: CacheFolder, states: NDArray[np.uint8]):
        self._folder, self._states = folder, states

    def has(self, key: bytes) -> bool:
        """Return whether there is a file of that key."""
        return self._folder.path(_STATES, key).exists()

    def read(self, key: bytes, slot: int) -> bool:
        """Read a snapshot into a slot, and return whether it was there, whole, and of this size."""
        room = self._states[slot].data
        content = self._folder.read(_STATES, key, room)
        return content is not None and content.nbytes == room.nbytes

    def used(self, key: bytes) -> None:
        """Note that a snapshot was in use."""
        self._folder.used(_STATES, [key])

    def save(self, key: bytes, find: Callable[[], int | None]) -> None:
        """Write a snapshot in the background. find: its slot, None once it is gone."""

        def content() -> list[NDArray[np.uint8]] | None:
            if (slot := find()) is None:
                return None
            copied = self._states[slot].copy()
            return [copied] if find() == slot else None

        self._folder.keep(_STATES, key, content)
