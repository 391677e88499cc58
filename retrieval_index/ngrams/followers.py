"""Followers of each context: lists in blocks of the pool, most frequent first, the later first on ties."""

from __future__ import annotations

import numpy as np

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.contexts import find_slot, high_bits, low_bits
from retrieval_index.ngrams.store import FREE, TOP, USED

FANOUT = 32  # most followers kept for a context


@subroutine
def count_follower(slots, pool, state, key, token):  # type: ignore[no-untyped-def]
    """Count `token` as a follower of the context `key`."""
    i = find_slot(slots, key)
    total = slots[i, 2]
    slots[i, 2] = total + 1
    if total == 0:
        slots[i, 0], slots[i, 1], slots[i, 3] = low_bits(key), token, high_bits(key) << 6
        state[USED] += 1
        return
    length, block = slots[i, 3] & 63, np.int64(slots[i, 1])
    if length == 0:
        if block == token:
            return
        follower, block, length = block, _move(pool, state, 0, 0, -1, 0), 1
        pool[block, 0], pool[block, 1] = follower, total
        slots[i, 1] = block
        slots[i, 3] += 1
    at = 0
    while at < length and pool[block + at, 0] != token:
        at += 1
    count = 1
    if at < length:
        count = pool[block + at, 1] + 1
    elif length == FANOUT:
        at = FANOUT - 1  # the last one, the rarest and oldest, gives up its place
    else:
        size = _class_of(length)
        if length == 2 << size:
            block = _move(pool, state, block, length, size, size + 1)
            slots[i, 1] = block
        slots[i, 3] += 1
    while at > 0 and pool[block + at - 1, 1] <= count:
        pool[block + at, 0], pool[block + at, 1] = pool[block + at - 1, 0], pool[block + at - 1, 1]
        at -= 1
    pool[block + at, 0], pool[block + at, 1] = token, count


@subroutine
def uncount_follower(slots, pool, state, key, token):  # type: ignore[no-untyped-def]
    """Undo one `count_follower`; a follower evicted from a full list is only subtracted from the total."""
    i = find_slot(slots, key)
    if slots[i, 2] == 0:
        return
    slots[i, 2] -= 1
    length, block = slots[i, 3] & 63, np.int64(slots[i, 1])
    at = 0
    while at < length and pool[block + at, 0] != token:
        at += 1
    if at < length:
        count = pool[block + at, 1] - 1
        while at + 1 < length and pool[block + at + 1, 1] > count:
            pool[block + at, 0], pool[block + at, 1] = pool[block + at + 1, 0], pool[block + at + 1, 1]
            at += 1
        pool[block + at, 0], pool[block + at, 1] = token, count
        if count == 0:  # it is now the last of the list
            _shorten(slots, pool, state, i, length)
    if slots[i, 2] == 0:
        _close_gap(slots, state, i)


@subroutine
def share_of(slots, pool, i, token):  # type: ignore[no-untyped-def]
    """Return in which share of its occurrences the context in slot `i` was followed by `token`."""
    length, block = slots[i, 3] & 63, np.int64(slots[i, 1])
    if length == 0:
        return 1.0 if block == token else 0.0
    for at in range(block, block + length):
        if pool[at, 0] == token:
            return pool[at, 1] / slots[i, 2]
    return 0.0


@subroutine
def _class_of(length):  # type: ignore[no-untyped-def]
    c = 0
    while (2 << c) < length:
        c += 1
    return c


@subroutine
def _move(pool, state, block, length, old, new):  # type: ignore[no-untyped-def]
    """Move a list to a block of another size class (old -1: there is none yet), and return the new block."""
    target = state[FREE + new]
    if target >= 0:
        state[FREE + new] = pool[target, 0]
    else:
        target = state[TOP]
        state[TOP] += 2 << new
    for j in range(length):
        pool[target + j, 0], pool[target + j, 1] = pool[block + j, 0], pool[block + j, 1]
    if old >= 0:
        pool[block, 0] = state[FREE + old]
        state[FREE + old] = block
    return target


@subroutine
def _shorten(slots, pool, state, i, length):  # type: ignore[no-untyped-def]
    """Drop the last of `length` followers of slot `i`; a list that fits into half its block moves to a smaller one."""
    block, size = np.int64(slots[i, 1]), _class_of(length)
    slots[i, 3] -= 1
    if length == 1:
        pool[block, 0] = state[FREE + size]
        state[FREE + size] = block
        slots[i, 2] = 0  # what is left of the total belongs to followers that had lost their place
    elif size > 0 and length - 1 == 1 << size:
        slots[i, 1] = _move(pool, state, block, length - 1, size, size - 1)


@subroutine
def _close_gap(slots, state, gap):  # type: ignore[no-untyped-def]
    """Empty a slot and move back the entries that had been displaced past it."""
    mask = len(slots) - 1
    state[USED] -= 1
    i = gap
    while True:
        i = (i + 1) & mask
        if slots[i, 2] == 0:
            break
        home = np.int64(slots[i, 0]) & mask
        if ((i - home) & mask) >= ((i - gap) & mask):
            for j in range(4):
                slots[gap, j] = slots[i, j]
            gap = i
    slots[gap, 2] = 0
