"""Storage of counted n-grams: one text with what followed its contexts, in flat arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.kernels.subroutine import subroutine

ORDERS = 5  # contexts of 0, 1, 2, 3 and 4 tokens
STORES = 3  # stores that a request is drafted from: 0 public, 1 its owner's memory, 2 its own text
SEPARATOR = -1  # stands between texts: no context reaches across it
ROOM = 64 * ORDERS  # pool entries that one token may need

START, END, USED, TOP = 0, 1, 2, 3  # start and end of the text, slots in use, end of the pool's used part
SLOTS, POOL, RING, HEADS = 4, 5, 6, 7  # sizes of the parts of the arena
FREE = 8  # FREE + c: first free block of 2 << c followers, -1: none
PUBLIC_MATCH, MEMORY_MATCH, OWN_MATCH = 13, 15, 17  # position after the agreeing tokens, and how many agree
STATE = 19


class Store(NamedTuple):
    """One array of each type, because every array passed to a kernel costs half a microsecond.

    arena: int32, one part after the other: slots [SLOTS, 4], a hash table of contexts: key, follower or block,
    occurrences, key and list length (0: the slot holds the only follower itself); pool [POOL, 2], blocks of followers:
    token, count; text [RING]; heads [HEADS], hash of 6 tokens -> the position after their latest occurrence. state:
    [STATE] int64, see the names above.
    """

    arena: NDArray[np.int32]
    state: NDArray[np.int64]


def new_store(slots: int, pool: int, ring: int, heads: int) -> Store:
    """Return an empty store; all sizes but `pool` are powers of two. Memory becomes resident only as it fills."""
    state = np.zeros(STATE, np.int64)
    state[SLOTS : HEADS + 1] = slots, pool, ring, heads
    state[FREE:PUBLIC_MATCH] = -1
    return Store(np.zeros(4 * slots + 2 * pool + ring + heads, np.int32), state)


def store_for(tokens: int) -> Store:
    """Return an empty store with space for about so many tokens."""
    size = 1 << max(9, (tokens + 1).bit_length())
    return new_store(slots=2 * size, pool=size, ring=size, heads=size)


def length(store: Store) -> int:
    """Return the number of tokens of its text, separators included."""
    return int(store.state[END] - store.state[START])


@subroutine
def parts(arena, state):  # type: ignore[no-untyped-def]
    """Return the arrays of an arena: slots, pool, text, heads."""
    a, b, c = 4 * state[SLOTS], 4 * state[SLOTS] + 2 * state[POOL], 4 * state[SLOTS] + 2 * state[POOL] + state[RING]
    return arena[:a].reshape((-1, 4)), arena[a:b].reshape((-1, 2)), arena[b:c], arena[c:]


@subroutine
def is_full(state):  # type: ignore[no-untyped-def]
    """Return whether one more token might not fit."""
    return (
        4 * (state[USED] + ORDERS) > 3 * state[SLOTS]
        or state[TOP] + ROOM > state[POOL]
        or state[END] - state[START] + 1 >= state[RING]
    )
