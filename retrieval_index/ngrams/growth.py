"""Stores that grow: each part is doubled as it fills."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval_index.ngrams.store import END, HEADS, ORDERS, ROOM, SLOTS, START, TOP, USED, Store, new_store
from retrieval_index.ngrams.texts import copy_into, remember


def store_for(tokens: int) -> Store:
    """An empty store with room for about so many tokens."""
    size = 1 << max(9, (tokens + 1).bit_length())
    return new_store(slots=2 * size, pool=size, ring=size, heads=size)


def grown(store: Store) -> Store:
    """A copy in which the nearly full parts are doubled."""
    state = store.state.tolist()
    slots, pool, ring, heads = state[SLOTS : HEADS + 1]
    if 2 * (state[USED] + ORDERS) > slots:
        slots *= 2
    if 3 * state[TOP] + 4 * ROOM > 2 * pool:
        pool *= 2
    if state[END] - state[START] + 1 >= ring // 2:
        ring, heads = 2 * ring, 2 * heads
    bigger = new_store(slots, pool, ring, heads)
    copy_into(*store, *bigger)
    return bigger


def with_text(store: Store, text: NDArray[np.int32], bound: int) -> Store:
    """The store, or a larger copy, with finished answers appended, a SEPARATOR after each; the oldest tokens beyond
    `bound` are evicted.
    """
    done = 0
    while done < len(text):
        done += remember(store.arena, store.state, text[done:], bound)
        if done < len(text):
            store = grown(store)
    return store


def length(store: Store) -> int:
    """Tokens of its text, separators included."""
    return int(store.state[END] - store.state[START])
