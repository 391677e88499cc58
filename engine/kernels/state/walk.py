"""The order in which a layer with a state takes the rows of a forward, and where it finds what they need.

A row's result is a fixed sequence of operations over its ancestors: the rows of the text, one after the other, then its
path in the tree. So it has the same bits whatever is beside it. A request's rows in a forward are, in this order,

1. rows that an earlier forward has kept and that are committed by now: they are replayed,
2. rows of its text, or nodes of a tree.

The first ones and a text's rows are its trunk. The state at the trunk's end is stored, over the one that was read or in
another slot, and so is the state within the trunk where a snapshot is wanted. A tree is walked depth first: the state
after a node is in scratch as long as nodes below it need it. No state of a node reaches memory.

Kinds of layers, one file each, have a class with the methods of `StateLayer`. Their kernels read the numbers of `Walk`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.state_shape import StateShape
from engine.kernels.amx import fetch
from engine.kernels.gemm.matmul import Multiplies
from engine.kernels.simd import long_at
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import Kernel, num_threads, thread_id

LEAF = 1 << 40
"""In the place of a step's goal: the state after the row is needed by no other."""


class StateRows(NamedTuple):
    """One request's rows of a forward, as layers with a state see them.

    kept: rows of earlier forwards, by their numbers in the store. parents: of all rows, the kept ones first; -1: the
    row comes after the stored state. stored: numbers that the new rows get in the store; [] if they are not kept.
    trunk: how many rows, from the first on, follow one another and are committed. slots: where the state is read, then
    where it is stored; ends: after how many rows of the trunk that is, one for each slot but the first, ascending, and
    the last one `trunk`.
    """

    kept: Sequence[int]
    parents: Sequence[int]
    stored: Sequence[int]
    trunk: int
    slots: Sequence[int]
    ends: Sequence[int]


class LayerPlace(NamedTuple):
    """Where a layer's part is in a request's state, and in a kept row; and the address of its walk's numbers."""

    state: int
    row: int
    walk: int


class BuildsSteps(Protocol):
    """A program, as a layer with a state sees it (`engine.kernels.layer.program`)."""

    def buffer(self, name: str, width: int) -> Tensor: ...
    def product(self, product: Multiplies, source: str, goal: str, outputs: int) -> None: ...
    def step(self, kernel: Kernel, records: np.ndarray[Any, Any]) -> None: ...


class StateLayer(Protocol):
    """A kind of layer with a state."""

    @property
    def state_bytes(self) -> int:
        """The bytes of a request's state, all of which a snapshot holds."""
        ...

    @property
    def row_bytes(self) -> int:
        """The bytes that are kept of each row, so that a commit can replay it."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """The bytes that each row needs while a forward runs."""
        ...

    @property
    def tile_bytes(self) -> int:
        """The bytes of the part of a state through which one thread takes the rows."""
        ...

    @property
    def out(self) -> Multiplies:
        """The product that the layer ends with."""
        ...

    def build(self, program: BuildsSteps, place: LayerPlace) -> str:
        """Add the layer's steps but for `out`; its input is in `x`. Returns the buffer that `out` multiplies."""
        ...


# Kernels read these numbers, int64 each, at the address of a walk.
_SEGMENTS, _SEGMENT_COUNT, _ROWS, _ROW_COUNT, _STEPS, _SAVES = range(6)
_STATES, _SLOT_BYTES, _STORE, _STORE_BYTES, _SCRATCH, _TILES, _TILE_BYTES = range(6, 13)
_NUMBERS = 13
_OF_SEGMENT, _OF_ROW, _OF_STEP, _OF_SAVE = 7, 3, 3, 2  # numbers of each
MOST_TAPS = 16
"""Rows that a convolution reads at most; a thread notes where they are in front of its parts of states."""


class Walk:
    """The numbers of one forward after the other, at `address`. scratch_bytes: of a row; tile_bytes: of a thread's
    part of a state.
    """

    def __init__(self, shape: StateShape, scratch_bytes: int, tile_bytes: int):
        self.shape, self._scratch_bytes, self._tile_bytes = shape, scratch_bytes, tile_bytes
        self._numbers = np.zeros(_NUMBERS, np.int64)
        self.address = int(self._numbers.ctypes.data)
        self._table = np.zeros(0, np.int64)
        self._scratch, self._tiles = torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)

    def begin(self, requests: Sequence[StateRows], states: int, store: int) -> None:
        """Set up the next forward. requests: in the order of their rows. states, store: addresses of all states and of
        all kept rows.
        """
        segments, rows, steps, saves, levels = _tables(requests)
        parts = segments, rows, steps, saves
        flat = [number for part in parts for number in part]
        if len(self._table) < len(flat):
            self._table = np.zeros(2 * len(flat), np.int64)
        self._table[: len(flat)] = flat
        at, places = int(self._table.ctypes.data), list[int]()
        for part in parts:
            places.append(at)
            at += 8 * len(part)
        count, threads = len(rows) // _OF_ROW, torch.get_num_threads()
        self._scratch = _grown(self._scratch, count * self._scratch_bytes)
        of_thread = 8 * MOST_TAPS + levels * self._tile_bytes
        self._tiles = _grown(self._tiles, threads * of_thread)
        scratch, tiles = self._scratch.data_ptr(), self._tiles.data_ptr()
        self._numbers[:] = (
            *(places[0], len(requests), places[1], count, places[2], places[3]),
            *(states, self.shape.slot_bytes, store, self.shape.row_bytes),
            *(scratch, tiles, of_thread),
        )


def _grown(room: Tensor, size: int) -> Tensor:
    return room if len(room) >= size else torch.zeros(2 * size, dtype=torch.uint8)


def _tables(requests: Sequence[StateRows]) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Return the numbers of segments, rows, steps and saves, and how many states are in scratch at a time."""
    segments, rows, steps, saves = list[int](), list[int](), list[int](), list[int]()
    levels, new = 0, 0
    for request in requests:
        first, first_step, first_save = len(rows) // _OF_ROW, len(steps) // _OF_STEP, len(saves) // _OF_SAVE
        kept, stored = len(request.kept), request.stored
        for row, parent in enumerate(request.parents):
            rows.append(parent + first if parent >= 0 else -1)
            if row < kept:
                rows += ~request.kept[row], -1
            else:
                rows += new, stored[row - kept] if stored else -1
                new += 1
        more, needed = steps_of(request)
        for row, source, goal in more:
            steps += row + first, source, goal
        for end, slot in zip(request.ends, request.slots[1:], strict=True):
            saves += first + end - 1, slot
        levels = max(levels, needed)
        ends = len(rows) // _OF_ROW, len(steps) // _OF_STEP, len(saves) // _OF_SAVE
        segments += first, ends[0], first_step, ends[1], first_save, ends[2], request.slots[0]
    return segments, rows, steps, saves, levels


def steps_of(request: StateRows) -> tuple[list[tuple[int, int, int]], int]:
    """Return each row after its parent, with where the state before it is and where the state after it goes: ~slot, or
    a level of the scratch, or LEAF. A row that needs the state after another, and whose step is the first to do so,
    comes right after it. The largest branch of a node comes last and takes the place of the node's state, so a tree of
    n rows needs no more than log2(n) + 1 levels. Returns also the number of levels.
    """
    steps, place, part = list[tuple[int, int, int]](), ~request.slots[0], 0
    for row in range(request.trunk):
        part += row == request.ends[part]
        goal = ~request.slots[part + 1]
        steps.append((row, place, goal))
        place = goal
    below: dict[int, list[int]] = {}
    sizes = [1] * (len(request.parents) + 1)  # of subtrees; the last one is that of the stored state, row -1
    for row in range(len(request.parents) - 1, request.trunk - 1, -1):
        below.setdefault(request.parents[row], []).append(row)
        sizes[request.parents[row]] += sizes[row]
    todo, levels = list[tuple[int, int, int, int]](), 0

    def take(node: int, place: int, free: int) -> None:
        """Take the rows below a node, whose state is at `place`. free: the first level that holds no state."""
        children = sorted(below.get(node, []), key=lambda row: (sizes[row], row))
        steps.extend((row, place, LEAF) for row in children if row not in below)
        inner = [row for row in children if row in below]
        for row in inner[:0:-1]:  # the last one may overwrite the state of its parent in scratch
            keeps = place < 0 or row != inner[-1]
            todo.append((row, place, free if keeps else place, free + keeps))
        if inner:
            keeps = place < 0 or len(inner) > 1
            todo.append((inner[0], place, free if keeps else place, free + keeps))

    take(request.trunk - 1, place, 0)
    while todo:
        row, source, goal, free = todo.pop()
        steps.append((row, source, goal))
        levels = max(levels, goal + 1)
        take(row, goal, free)
    return steps, levels


# What kernels ask.


@subroutine
def segment_count(walk: int) -> Any:
    return long_at(walk + 8 * _SEGMENT_COUNT)


@subroutine
def row_count(walk: int) -> Any:
    """Return the number of kept and new rows of all requests."""
    return long_at(walk + 8 * _ROW_COUNT)


@subroutine
def _of_segment(walk: int, segment: int, number: int) -> Any:
    return long_at(long_at(walk + 8 * _SEGMENTS) + 8 * (segment * _OF_SEGMENT + number))


@subroutine
def rows_of(walk: int, segment: int) -> Any:
    """Return the first row of the segment, and one past its last."""
    return _of_segment(walk, segment, 0), _of_segment(walk, segment, 1)


@subroutine
def step_range(walk: int, segment: int) -> Any:
    """Return the first step of the segment, and one past its last."""
    return _of_segment(walk, segment, 2), _of_segment(walk, segment, 3)


@subroutine
def save_range(walk: int, segment: int) -> Any:
    """Return the first state of the segment that is stored, and one past the last."""
    return _of_segment(walk, segment, 4), _of_segment(walk, segment, 5)


@subroutine
def read_slot(walk: int, segment: int) -> Any:
    """Return the slot of the segment's state."""
    return _of_segment(walk, segment, 6)


@subroutine
def parent_of(walk: int, row: int) -> Any:
    """Return the row before it; -1: the state of its segment."""
    return long_at(long_at(walk + 8 * _ROWS) + 24 * row)


@subroutine
def batch_row(walk: int, row: int) -> Any:
    """Return where a new row is in the program's buffers; negative for a kept row."""
    return long_at(long_at(walk + 8 * _ROWS) + 24 * row + 8)


@subroutine
def stored_as(walk: int, row: int) -> Any:
    """Return the number under which a row is to be kept, or -1."""
    return long_at(long_at(walk + 8 * _ROWS) + 24 * row + 16)


@subroutine
def step_at(walk: int, step: int) -> Any:
    """Return a row, where the state before it is, and where the state after it goes."""
    place = long_at(walk + 8 * _STEPS) + 24 * step
    return long_at(place), long_at(place + 8), long_at(place + 16)


@subroutine
def save_at(walk: int, save: int) -> Any:
    """Return a row, and the slot in which the state after it is stored."""
    place = long_at(walk + 8 * _SAVES) + 16 * save
    return long_at(place), long_at(place + 8)


@subroutine
def state_of(walk: int, slot: int) -> Any:
    """Return the address of the state in that slot."""
    return long_at(walk + 8 * _STATES) + slot * long_at(walk + 8 * _SLOT_BYTES)


@subroutine
def kept_row(walk: int, number: int) -> Any:
    """Return the address of the kept row of that number."""
    return long_at(walk + 8 * _STORE) + number * long_at(walk + 8 * _STORE_BYTES)


@subroutine
def scratch_of(walk: int) -> Any:
    """Return the address of the scratch of rows."""
    return long_at(walk + 8 * _SCRATCH)


@subroutine
def window_room(walk: int, thread: int) -> Any:
    """Return the address of a thread's scratch for `find_window`."""
    return long_at(walk + 8 * _TILES) + thread * long_at(walk + 8 * _TILE_BYTES)


@subroutine
def tiles_of(walk: int, thread: int) -> Any:
    """Return the address of a thread's scratch for parts of states."""
    return window_room(walk, thread) + 8 * MOST_TAPS


@subroutine
def share_of(count: int) -> Any:
    """Return the first of this thread's units of `count`, and one past the last: neighbours, whose states lie
    together.
    """
    thread, threads = np.int64(thread_id()), np.int64(num_threads())
    return thread * count // threads, (thread + 1) * count // threads


@subroutine
def fetch_part(address: int, size: int) -> None:
    """Prefetch the part of a state that a thread takes rows through next."""
    for at in range(address, address + size, 64):
        fetch(at)
