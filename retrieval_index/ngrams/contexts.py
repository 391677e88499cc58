"""Contexts of a text (the last 0 to 4 tokens before a place) and the hash table that holds them."""

from __future__ import annotations

import numpy as np

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.store import ORDERS, STORES

EMPTY = np.uint64(0x51ED270B)  # the key of the context of no tokens


@subroutine
def mix(h, token):  # type: ignore[no-untyped-def]
    h = (h ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(31))


@subroutine
def low_bits(key):  # type: ignore[no-untyped-def]
    return np.int32(key & np.uint64(0x7FFFFFFF))


@subroutine
def high_bits(key):  # type: ignore[no-untyped-def]
    return np.int32((key >> np.uint64(33)) & np.uint64(0xFFFFFF))


@subroutine
def find_slot(slots, key):  # type: ignore[no-untyped-def]
    """Return the slot of `key`, or the empty slot where it would go."""
    mask = len(slots) - 1
    low, high = low_bits(key), high_bits(key)
    i = np.int64(low) & mask
    while slots[i, 2] != 0 and (slots[i, 0] != low or (slots[i, 3] >> 6) != high):
        i = (i + 1) & mask
    return i


@subroutine
def fill_keys(text, start, position, keys):  # type: ignore[no-untyped-def]
    """Fill keys[o] with the key of the o tokens before `position`, and return how many keys there are."""
    mask = len(text) - 1
    keys[0] = EMPTY
    for order in range(1, ORDERS):
        at = position - order
        if at < start or text[at & mask] < 0:
            return order
        keys[order] = mix(keys[order - 1], text[at & mask])
    return ORDERS


@subroutine
def look_up(slots, keys, n, found, store):  # type: ignore[no-untyped-def]
    """Fill found[STORES * order + store] with slots, -1 where the context is unknown (as all longer ones then are)."""
    for order in range(ORDERS):
        found[STORES * order + store] = -1
    for order in range(n):
        i = find_slot(slots, keys[order])
        if slots[i, 2] == 0:
            break
        found[STORES * order + store] = i
