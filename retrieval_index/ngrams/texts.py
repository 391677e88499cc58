"""Texts that grow, and their stores with them: a request's own, and those of finished answers, which forget their
oldest tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.contexts import fill_keys, look_up
from retrieval_index.ngrams.followers import count_follower, share_of, uncount_follower
from retrieval_index.ngrams.kernel import kernel
from retrieval_index.ngrams.matches import follow, match_hash, next_of
from retrieval_index.ngrams.mixture import COMPONENTS, adjust, bucket_of, match_bucket_of
from retrieval_index.ngrams.store import (
    END,
    FREE,
    HEADS,
    MEMORY_MATCH,
    ORDERS,
    OWN_MATCH,
    PUBLIC_MATCH,
    ROOM,
    SLOTS,
    START,
    STORES,
    TOP,
    USED,
    Store,
    is_full,
    new_store,
    parts,
)


@kernel
def append(  # type: ignore[no-untyped-def]
    own_arena, own, memory_arena, memory, public_arena, public, weights, tokens, learn
):
    """Append to a request's text until its store is full, and return how many tokens were appended. With `learn` they
    adjust the weights. weights: [COMPONENTS, BUCKETS, 2] float64, weight and how often it was adjusted.
    """
    o_slots, o_pool, o_text, o_heads = parts(own_arena, own)
    m_slots, m_pool, m_text, m_heads = parts(memory_arena, memory)
    p_slots, p_pool, p_text, p_heads = parts(public_arena, public)
    keys, found = np.empty(ORDERS, np.uint64), np.empty(STORES * ORDERS, np.int64)
    bucket, share = np.empty(COMPONENTS, np.int64), np.empty(COMPONENTS)
    for done in range(len(tokens)):
        if is_full(own):
            return done
        token = tokens[done]
        if learn:
            n = fill_keys(o_text, own[START], own[END], keys)
            look_up(p_slots, keys, n, found, 0)
            look_up(m_slots, keys, n, found, 1)
            look_up(o_slots, keys, n, found, 2)
            for c in range(0, STORES * ORDERS, STORES):
                bucket[c] = bucket[c + 1] = bucket[c + 2] = -1
                if found[c] >= 0:
                    bucket[c] = bucket_of(p_slots, p_pool, found[c])
                    share[c] = share_of(p_slots, p_pool, found[c], token)
                if found[c + 1] >= 0:
                    bucket[c + 1] = bucket_of(m_slots, m_pool, found[c + 1])
                    share[c + 1] = share_of(m_slots, m_pool, found[c + 1], token)
                if found[c + 2] >= 0:
                    bucket[c + 2] = bucket_of(o_slots, o_pool, found[c + 2])
                    share[c + 2] = share_of(o_slots, o_pool, found[c + 2], token)
            c = STORES * ORDERS
            p_next = next_of(p_text, public, own[PUBLIC_MATCH], own[PUBLIC_MATCH + 1])
            m_next = next_of(m_text, memory, own[MEMORY_MATCH], own[MEMORY_MATCH + 1])
            o_next = next_of(o_text, own, own[OWN_MATCH], own[OWN_MATCH + 1])
            bucket[c] = match_bucket_of(own[PUBLIC_MATCH + 1]) if p_next >= 0 else -1
            bucket[c + 1] = match_bucket_of(own[MEMORY_MATCH + 1]) if m_next >= 0 else -1
            bucket[c + 2] = match_bucket_of(own[OWN_MATCH + 1]) if o_next >= 0 else -1
            share[c] = 1.0 if p_next == token else 0.0
            share[c + 1] = 1.0 if m_next == token else 0.0
            share[c + 2] = 1.0 if o_next == token else 0.0
            adjust(weights, bucket, share)
        push(o_slots, o_pool, o_text, o_heads, own, token, keys)
        own[PUBLIC_MATCH], own[PUBLIC_MATCH + 1] = follow(
            p_text, p_heads, public, o_text, own[END], own[START], own[PUBLIC_MATCH], own[PUBLIC_MATCH + 1]
        )
        own[MEMORY_MATCH], own[MEMORY_MATCH + 1] = follow(
            m_text, m_heads, memory, o_text, own[END], own[START], own[MEMORY_MATCH], own[MEMORY_MATCH + 1]
        )
        own[OWN_MATCH], own[OWN_MATCH + 1] = follow(
            o_text, o_heads, own, o_text, own[END], own[START], own[OWN_MATCH], own[OWN_MATCH + 1]
        )
    return len(tokens)


@kernel
def remember(arena, state, tokens, bound):  # type: ignore[no-untyped-def]
    """Append a finished text to a store of finished texts, and evict the oldest tokens beyond `bound`; returns as
    `append`.
    """
    slots, pool, text, heads = parts(arena, state)
    keys = np.empty(ORDERS, np.uint64)
    for done in range(len(tokens)):
        while state[END] - state[START] >= bound:
            evict(slots, pool, text, state, keys)
        if is_full(state):
            return done
        push(slots, pool, text, heads, state, tokens[done], keys)
    return len(tokens)


def with_text(store: Store, text: NDArray[np.int32], bound: int) -> Store:
    """Return the store, or a larger copy, with finished answers appended, a SEPARATOR after each; the oldest tokens
    beyond `bound` are evicted.
    """
    done = 0
    while done < len(text):
        done += remember(store.arena, store.state, text[done:], bound)
        if done < len(text):
            store = grown(store)
    return store


def grown(store: Store) -> Store:
    """Return a copy in which the nearly full parts are doubled."""
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


@kernel
def copy_into(arena, state, bigger_arena, bigger):  # type: ignore[no-untyped-def]
    """Move a store's content into a larger, empty one."""
    slots, pool, text, _ = parts(arena, state)
    new_slots, new_pool, new_text, new_heads = parts(bigger_arena, bigger)
    mask = len(new_slots) - 1
    for i in range(len(slots)):
        if slots[i, 2]:
            j = np.int64(slots[i, 0]) & mask
            while new_slots[j, 2]:
                j = (j + 1) & mask
            for k in range(4):
                new_slots[j, k] = slots[i, k]
    # written as loops, because numba compiles seconds of error texts for each assignment of slices
    for i in range(state[TOP]):
        new_pool[i, 0], new_pool[i, 1] = pool[i, 0], pool[i, 1]
    for i in range(len(state)):
        if i < SLOTS or i >= FREE:
            bigger[i] = state[i]
    for position in range(state[START], state[END]):
        new_text[position & (len(new_text) - 1)] = text[position & (len(text) - 1)]
        h = match_hash(text, position, state[START])
        if h and text[position & (len(text) - 1)] >= 0:
            new_heads[h & (len(new_heads) - 1)] = np.int32(position & 0x7FFFFFFF)


@subroutine
def push(slots, pool, text, heads, state, token, keys):  # type: ignore[no-untyped-def]
    """Append `token` to the text and count it, unless it is a separator."""
    position = state[END]
    text[position & (len(text) - 1)] = token
    state[END] = position + 1
    if token < 0:
        return
    for order in range(fill_keys(text, state[START], position, keys)):
        count_follower(slots, pool, state, keys[order], token)
    h = match_hash(text, position, state[START])
    if h:
        heads[h & (len(heads) - 1)] = np.int32(position & 0x7FFFFFFF)


@subroutine
def evict(slots, pool, text, state, keys):  # type: ignore[no-untyped-def]
    """Forget the oldest token, and the counts of the contexts that begin with it."""
    start = state[START]
    for order in range(min(ORDERS, state[END] - start)):
        token = text[(start + order) & (len(text) - 1)]
        if token < 0:
            break
        fill_keys(text, start, start + order, keys)
        uncount_follower(slots, pool, state, keys[order], token)
    state[START] = start + 1
