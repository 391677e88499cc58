"""The states of all requests: of models whose layers do not all have keys and values.

A state takes a slot, whatever the length of its text. Slots are reference-counted, as blocks of keys and values are. A
snapshot is the state at the end of a full block, which requests whose texts begin alike share: it is never written to.
Along a text they are thinned out: the farther from its end, the fewer. Those that no request uses stay until their room
is needed; the least recently used goes first.

Beside the slots is a store of rows: what layers need to replay the rows of a draft that is accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.core.errors import OutOfBlocks
from engine.core.state_shape import StateShape
from engine.model.saved.states import SavedStates

EMPTY = 0
"""The slot of the empty text: zeros."""
SLOTS_EACH = 2
"""Slots that a request may hold: its state, and the one that the next forward writes to."""
ROWS = 64
"""Rows of the store at first. It grows where the trees that are verified together have more nodes."""
SPACING = 4096
"""Positions between the snapshots of a text that are never thinned out, a power of two."""
PASSING_SHARE = 4
"""Snapshots that may be thinned out take the place of others only up to this part of the slots, a quarter."""
_LINE = 64  # bytes of a cache line
_CPU = torch.device("cpu")


def stays(position: int, *ends: int) -> bool:
    """Return whether the snapshot at a position stays in a text with these ends: of its prompt, and of what follows.
    The larger the power of two that divides a position, the longer it stays: wherever another text parts from this one,
    d positions before an end, a snapshot is fewer than max(BLOCK_SIZE, 2 * d) positions earlier, and than SPACING.
    """
    aligned = position & -position
    return aligned >= SPACING or any(0 <= end - position <= 2 * aligned for end in ends)


def _zeros(count: int, size: int, device: torch.device) -> Tensor:
    """Return [count, size] zeros that begin at a cache line: vectors that cross two lines take a kernel twice
    the time.
    """
    if device.type != "cpu":
        return torch.zeros(count, size, dtype=torch.uint8, device=device)
    whole = np.zeros(count * size + _LINE, np.uint8)
    start = -whole.ctypes.data % _LINE
    return torch.from_numpy(whole[start : start + count * size].reshape(count, size))


class StatePool:
    """A pool of `slots` slots beside the empty one. On a CPU a slot takes memory when it is first written.

    states: [slots + 1, bytes] uint8; store: [rows, bytes] uint8, the kept rows.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device = _CPU):
        self.shape, self.slots = shape, slots
        self.states = _zeros(slots + 1, shape.slot_bytes, device)
        self.saved: SavedStates | None = None
        self._free = list(range(slots, 0, -1))
        self._references = [0] * (slots + 1)
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # by the number of the text; used longest ago first
        self._passing: dict[int, int] = {}  # of those that may be thinned out, by the number: the position
        self.kept = 0  # snapshots ever kept
        self.store = _zeros(ROWS, shape.row_bytes, device)
        self._free_rows = list(range(ROWS - 1, -1, -1))

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the states and the kept rows are."""
        states, store = (int(part.data_ptr()) for part in (self.states, self.store))
        return states, store

    def has_free(self, count: int = 1) -> bool:
        """Return whether `count` slots can be taken, including those of snapshots that no request uses."""
        missing = count - len(self._free)
        return missing <= 0 or len([*islice(self._unused(), missing)]) == missing

    def _unused(self) -> Iterator[int]:
        """The texts of snapshots that no request uses, used longest ago first."""
        return (number for number, slot in self._snapshots.items() if self._references[slot] == 1)

    @property
    def memory(self) -> int:
        """Bytes at most of the states, and of the store."""
        return self.slots * self.shape.slot_bytes + int(self.store.nbytes)

    # Slots.

    def take(self) -> int:
        """Take a slot. Raises OutOfBlocks if requests use all of them."""
        if not (self._free or self._evict(self.slots // PASSING_SHARE + 1) or self._evict(self.slots + 1)):
            raise OutOfBlocks(f"verifier.kv_memory: {self.slots} states of requests are in use; raise it")
        return self._take_free()

    def take_passing(self) -> int | None:
        """Take a slot for a snapshot that may be thinned out; None if there is none."""
        return self._take_free() if self._free or self._evict(self.slots // PASSING_SHARE) else None

    def _evict(self, enough: int) -> bool:
        """Forget the snapshot used longest ago, of those that may be thinned out if there are `enough` of them. Return
        whether there was one.
        """
        passing = len(self._passing) >= enough
        oldest = next((number for number in self._unused() if not passing or number in self._passing), None)
        if oldest is not None:
            self.drop(oldest)
        return oldest is not None

    def _take_free(self) -> int:
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def hold(self, slot: int) -> int:
        """Add a reference to a slot, which is returned."""
        self._references[slot] += slot != EMPTY
        return slot

    def give(self, slot: int) -> None:
        """Drop a reference to a slot."""
        if slot == EMPTY:
            return
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)

    def owned(self, slot: int) -> bool:
        """Return whether the holder of the slot is its only one, and may write to it."""
        return self._references[slot] == 1

    # Snapshots.

    def has(self, number: int, key: bytes | None = None) -> bool:
        """Return whether there is a snapshot of the text of that number, or in the cache folder by that key."""
        on_disk = key is not None and self.saved is not None and self.saved.has(key)
        return number in self._snapshots or on_disk

    def find(self, number: int) -> int | None:
        """Return the snapshot at the end of the text of that number; None if there is none."""
        if (slot := self._snapshots.get(number)) is not None:
            self._snapshots.move_to_end(number)
        return slot

    def keep(self, number: int, slot: int, passing: int | None = None) -> None:
        """Let requests find the state of a text; of two the first stays. passing: how long the text is whose snapshot
        may be thinned out; None: it may not.
        """
        if passing is None:
            self.spare(number)
        if number not in self._snapshots:
            self._snapshots[number] = self.hold(slot)
            self.kept += 1
            if passing is not None:
                self._passing[number] = passing

    def spare(self, number: int) -> None:
        """Do not thin out the snapshot of a text."""
        self._passing.pop(number, None)

    def thin(self, texts: Sequence[int], newest: int, prompt_end: int) -> None:
        """Forget the snapshots along a text that do not stay. texts: the numbers of the texts that its blocks end;
        newest: the position of the newest snapshot, which stays.
        """
        for number, position in [*self._passing.items()]:
            along = position < newest and texts[position // BLOCK_SIZE - 1] == number
            if along and not stays(position, prompt_end, max(prompt_end, newest)):
                self.drop(number)

    def drop(self, number: int) -> None:
        """Forget the snapshot of a text, if there is one."""
        self.spare(number)
        if (slot := self._snapshots.pop(number, None)) is not None:
            self.give(slot)

    def save(self, number: int, key: bytes) -> None:
        """Write a snapshot to the cache folder, unless it has been evicted by then. key: of its text there."""
        if self.saved is not None:
            self.saved.save(key, lambda: self._snapshots.get(number))

    def restore(self, number: int, key: bytes) -> int | None:
        """Read the snapshot of a text from the cache folder; None if it is not there."""
        if self.saved is None or not self.has_free() or not self.saved.has(key):
            return None
        slot = self.take()
        if self.saved.read(key, slot):
            self.keep(number, slot)
            self.saved.used(key)
        self.give(slot)
        return self.find(number)

    # Rows.

    def take_rows(self, count: int) -> list[int]:
        """Take so many rows of the store."""
        while len(self._free_rows) < count:
            rows = len(self.store)
            self.store = torch.cat([self.store, torch.zeros_like(self.store)])
            self._free_rows = [*range(2 * rows - 1, rows - 1, -1), *self._free_rows]
        return [self._free_rows.pop() for _ in range(count)]

    def give_rows(self, rows: Sequence[int]) -> None:
        """Give rows of the store back."""
        self._free_rows.extend(rows)
