"""Blocks of keys and values in a cache folder: which text a block ends is its key, so a prefix is found block by block.

The key of a block is the SHA-256 of the key before it and of its tokens; the first one begins with everything that
decides the bits (`engine.verifier.disk_cache`) and whose text it is. The thread of the folder copies a block from the
pool while rounds go on: a block that can be found is never written to, and whether it still can be is looked up after
the copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.core.hidden_states import HostStates
from engine.files.cache_folder import CacheFolder

_BLOCKS, _STATES = "blocks", "states"
_MOST_STATES = 1 << 26  # most bytes of a block's hidden states


class SavedBlocks:
    """The blocks of one pool in a cache folder. kept: its keys and values, [layers, blocks, ...] each. identity: of
    everything that decides their bits.
    """

    def __init__(self, folder: CacheFolder, identity: bytes, kept: Sequence[Tensor]):
        self.folder, self.identity = folder, identity
        self._kept = [_bytes(one) for one in kept]
        self._block_room = np.empty(sum(one[:, 0].size for one in self._kept), np.uint8)  # for a block that is read
        self._states_room = np.empty(_MOST_STATES, np.uint8).data  # memory becomes resident only as it fills

    def root(self, tenant: str) -> bytes:
        """Return the key of the empty text of a tenant."""
        return hashlib.sha256(self.identity + tenant.encode("utf8", "surrogatepass")).digest()

    def next_key(self, key: bytes, tokens: Sequence[int]) -> bytes:
        """Return the key of the text that a key and the 16 tokens after it make."""
        return hashlib.sha256(key + np.asarray(tokens, "<i4").tobytes()).digest()

    def has(self, key: bytes) -> bool:
        """Return whether there is a file of that key."""
        return self.folder.path(_BLOCKS, key).exists()

    def read(self, key: bytes) -> NDArray[np.uint8] | None:
        """Return a block's keys and values, valid until the next call; None if they are not there."""
        room = self._block_room.data.cast("B")
        content = self.folder.read(_BLOCKS, key, room)
        return self._block_room if content is not None and content.nbytes == room.nbytes else None

    def place(self, content: NDArray[np.uint8], block: int) -> None:
        """Copy a block that was read into the pool."""
        at = 0
        for one in self._kept:
            layers, _, size = one.shape
            one[:, block] = content[at : at + layers * size].reshape(layers, size)
            at += layers * size

    def save(self, key: bytes, find: Callable[[], int | None]) -> None:
        """Write a block in the background. find: the block with that content, None once there is none."""

        def content() -> list[NDArray[np.uint8]] | None:
            if (block := find()) is None:
                return None
            copies = [one[:, block].copy() for one in self._kept]
            return copies if find() == block else None

        self.folder.keep(_BLOCKS, key, content)

    def read_hidden_states(self, key: bytes, layers: Sequence[int]) -> HostStates | None:
        """Return a block's hidden states after these layers, None if they are not there."""
        content = self.folder.read(_STATES, _key_of_states(key, layers), self._states_room)
        if content is None:
            return None
        states: HostStates = np.frombuffer(content, np.uint16).reshape(BLOCK_SIZE, len(layers), -1).copy()
        return states

    def save_hidden_states(self, key: bytes, layers: Sequence[int], states: Callable[[], HostStates | None]) -> None:
        """Write a block's hidden states in the background. states: None once they are gone."""

        def content() -> list[HostStates] | None:
            return None if (found := states()) is None else [np.ascontiguousarray(found)]

        self.folder.keep(_STATES, _key_of_states(key, layers), content)

    def used(self, keys: Sequence[bytes]) -> None:
        """Note that a text of these keys was in use until now."""
        self.folder.used(_BLOCKS, keys)


def _key_of_states(key: bytes, layers: Sequence[int]) -> bytes:
    return hashlib.sha256(key + np.asarray(layers, "<i4").tobytes()).digest()


def _bytes(pool: Tensor) -> NDArray[np.uint8]:
    """Return [layers, blocks, bytes of a layer's block], a view."""
    layers, blocks = pool.shape[:2]
    return np.asarray(pool.view(layers, blocks, -1).view(torch.uint8).numpy())
