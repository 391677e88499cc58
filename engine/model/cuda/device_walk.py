"""What the Triton kernels of layers with a state are told of a forward: `engine.kernels.state.walk` as int32 numbers.

A program keeps the state that it takes rows through in registers. So a step loads a state only where another than the
last one is needed, and stores one only where it is loaded again: at a tree's branches, and at the end of what is
committed.

A forward has few rows, so a batch may run in slices. The rows that a later slice's rows come after are replayed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from engine.kernels.state.walk import LEAF, StateRows, steps_of

HELD = 1 << 30
"""In the place of a step's source: the state is in registers. In that of its goal: it stays there."""
NOWHERE = HELD + 1
"""In the place of a step's goal: the state after the row is needed by no other."""
MOST_KEPT = 1024
"""Kept rows of a forward at most."""

_HEADER = 6  # how many segments and rows there are, and where segments, rows, steps and saves begin
_OF_SEGMENT, _OF_ROW, _OF_STEP, _OF_SAVE = 4, 4, 3, 2  # numbers of each


def most_levels(rows: int) -> int:
    """Return how many states a walk over a tree of so many rows has in scratch at most: the last branch of each node,
    which is the largest one, takes the place of the node's own.
    """
    return rows.bit_length()


def walk_tensor(requests: Sequence[StateRows], size: int) -> Tensor:
    """Return the numbers of a forward of `size` rows, as many for every forward of that size. requests: in the order of
    their rows.

    Of each segment: its first step and one past its last, and the same of its saves. Of each row: the one before it, or
    -1; where it is in the batch, or ~its number in the store; the number under which it is to be kept, or -1; and the
    slot of its request's state. Of each step: the row, where the state before it is, and where the state after it goes.
    Of each save: the row after which the state is stored, and the slot.
    """
    segments, rows, steps, saves = list[int](), list[int](), list[int](), list[int]()
    new = 0
    for request in requests:
        first, kept, stored = len(rows) // _OF_ROW, len(request.kept), request.stored
        begins = len(steps) // _OF_STEP, len(saves) // _OF_SAVE
        for row, parent in enumerate(request.parents):
            at = row - kept
            place = (~request.kept[row], -1) if at < 0 else (new + at, stored[at] if stored else -1)
            rows += parent + first if parent >= 0 else -1, *place, request.slots[0]
        new += len(request.parents) - kept
        steps += chain.from_iterable((row + first, source, goal) for row, source, goal in held_steps(request))
        for end, slot in zip(request.ends, request.slots[1:], strict=True):
            saves += first + end - 1, slot
        segments += begins[0], len(steps) // _OF_STEP, begins[1], len(saves) // _OF_SAVE
    room = _HEADER + _OF_SEGMENT * size + (size + MOST_KEPT) * (_OF_ROW + _OF_STEP + _OF_SAVE)
    found = torch.zeros(room, dtype=torch.int32)
    header, at = [len(requests), len(rows) // _OF_ROW], _HEADER
    for part in (segments, rows, steps, saves):
        found[at : at + len(part)] = torch.tensor(part, dtype=torch.int32)
        header.append(at)
        at += len(part)
    found[:_HEADER] = torch.tensor(header, dtype=torch.int32)
    return found


def held_steps(request: StateRows) -> list[tuple[int, int, int]]:
    """Return the steps of a request for a program that keeps the latest state."""
    steps, _ = steps_of(request)
    held, loads = HELD, list[bool]()
    for _, source, goal in steps:
        loads.append(source != held)
        held = held if goal == LEAF else goal
    wanted, found = {~slot for slot in request.slots[1:]}, list[tuple[int, int, int]]()
    for (row, source, goal), loaded in zip(reversed(steps), reversed(loads), strict=True):
        place = NOWHERE if goal == LEAF else goal if goal in wanted else HELD
        wanted.discard(goal)
        if loaded:
            wanted.add(source)
        found.append((row, source if loaded else HELD, place))
    return found[::-1]


def cut(request: StateRows, begin: int, end: int) -> StateRows:
    """Return what a forward over the new rows from `begin` to `end` is told, once the ones before have run. Within a
    text the state is then in the last slot, unless it is to be stored in another one.
    """
    kept = len(request.kept)
    if not request.stored:
        first, last = (0 if begin == 0 else kept + begin), kept + end
        slot_at = dict(zip([0, *request.ends], request.slots, strict=True))
        goals = [(at, slot) for at, slot in slot_at.items() if first < at <= last]
        if not goals or goals[-1][0] < last:
            goals.append((last, request.slots[-1]))
        slots = [slot_at.get(first, request.slots[-1]), *(slot for _, slot in goals)]
        ends, count = [at - first for at, _ in goals], last - first
        return StateRows([] if begin else request.kept, range(-1, count - 1), [], count, slots, ends)
    if begin == 0:
        return request._replace(parents=request.parents[: kept + end], stored=request.stored[:end])
    trunk = request.trunk
    parents = [max(-1, parent - trunk) for parent in request.parents[trunk : kept + end]]
    drafted = [*request.kept[trunk:], *request.stored[:begin]]
    return StateRows(drafted, parents, request.stored[begin:end], 0, request.slots[-1:], [])


def slice_of(walked: Sequence[StateRows], spans: Sequence[tuple[int, int]], first: int, end: int) -> list[StateRows]:
    """Return what a forward over some rows of a batch is told. spans: each request's first row and one past its
    last.
    """
    return [
        cut(request, max(first, begin) - begin, min(end, stop) - begin)
        for request, (begin, stop) in zip(walked, spans, strict=True)
        if begin < end and stop > first
    ]


def fitting_end(walked: Sequence[StateRows], spans: Sequence[tuple[int, int]], first: int, end: int) -> int:
    """Return `end`, or where an earlier request's rows end, so that a forward from `first` on has no more kept rows
    than there is room for.
    """
    room = MOST_KEPT
    for request, (begin, stop) in zip(walked, spans, strict=False):
        if begin < end and stop > first:
            room -= len(request.kept) + (max(0, first - begin) if request.stored else 0)
            if room < 0 and begin > first:
                return begin
    return end
