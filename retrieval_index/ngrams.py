"""Compiled kernels of the session index: counted n-grams in flat arrays, and trees drafted from them.

A store is one text (a request's own, or the shared cache of finished answers) with, for each of its contexts of 0 to 4
tokens, a short list of the tokens that followed it, most frequent first, the later of two equals first. Longer contexts
are served by a *match*: the latest place whose last 6 tokens were the same, followed token by token for as long as it
agrees with the text.

All kernels stay in this one file: numba's cache notices a change of the file a kernel stands in, and of no other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

ORDERS = 5  # contexts of 0, 1, 2, 3 and 4 tokens
MATCH = 6  # tokens that must agree before a match is followed
SEPARATOR = -1  # stands between texts: no context reaches across it
FANOUT = 32  # most followers kept for a context
LOOK = 16  # most followers looked at
COMPONENTS = 2 * ORDERS + 2  # (order, store) from short to long, then the matches; even: shared, odd: own text
BUCKETS = 32
LONGEST = 32  # a match found is compared this far back
TAIL = 64  # tokens before a draft that are looked at; a power of two
ROOM = 64 * ORDERS  # pool entries that one token may need
RATE, PRIOR = 0.01, 20.0  # slowest step of the weights, and how many observations the first weight stands for
CARELESS = 0.1  # candidates' chances may lack this fraction of what would get a node into the tree
FLOOR = 1e-5  # chance of a token never seen

START, END, USED, TOP, FREE = 0, 1, 2, 3, 4  # indices of Store.state; FREE + c: the free blocks of 2 << c entries
STATE = FREE + 5


class Store(NamedTuple):
    """slots: [capacity, 4] int32, a hash table of contexts: key, follower or block, occurrences, key and list length
    (0: the one follower itself stands in the slot). pool: [entries] int64, blocks of followers, token | count << 32.
    text: [ring] int32. heads: [power of two] int32, hash of 6 tokens -> the position behind their latest occurrence.
    state: [STATE] int64: first and end position of the text, slots in use, end of the pool's used part, free blocks.
    """

    slots: NDArray[np.int32]
    pool: NDArray[np.int64]
    text: NDArray[np.int32]
    heads: NDArray[np.int32]
    state: NDArray[np.int64]


def new_store(tokens: int) -> Store:
    """A store with room for about `tokens` tokens; the arrays are touched, so resident, only as they fill."""
    size = 1 << max(8, (tokens - 1).bit_length())
    state = np.zeros(STATE, np.int64)
    state[FREE:] = -1
    return Store(
        np.zeros((4 * size, 4), np.int32),
        np.zeros(2 * size, np.int64),
        np.zeros(size, np.int32),
        np.zeros(2 * size, np.int32),
        state,
    )


@njit(cache=True, inline="always")
def _mix(h, token):  # type: ignore[no-untyped-def]
    h = (h ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(31))


@njit(cache=True)
def _find(slots, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, or of the gap where it would be."""
    mask = len(slots) - 1
    low, high = np.int32(key & np.uint64(0x7FFFFFFF)), np.int32((key >> np.uint64(33)) & np.uint64(0xFFFFFF))
    i = np.int64(low) & mask
    while slots[i, 2] != 0 and (slots[i, 0] != low or (slots[i, 3] >> 6) != high):
        i = (i + 1) & mask
    return i


@njit(cache=True)
def _keys(store, position, keys):  # type: ignore[no-untyped-def]
    """Fill keys[o] with the context of o tokens before `position`; returns how many there are."""
    text, mask = store.text, len(store.text) - 1
    h = np.uint64(0x51ED270B)
    keys[0] = h
    for order in range(1, ORDERS):
        at = position - order
        if at < store.state[START] or text[at & mask] < 0:
            return order
        h = _mix(h, text[at & mask])
        keys[order] = h
    return ORDERS


@njit(cache=True)
def _allocate(store, size_class):  # type: ignore[no-untyped-def]
    block = store.state[FREE + size_class]
    if block >= 0:
        store.state[FREE + size_class] = store.pool[block]
    else:
        block = store.state[TOP]
        store.state[TOP] += 2 << size_class
    return block


@njit(cache=True)
def _release(store, block, size_class):  # type: ignore[no-untyped-def]
    store.pool[block] = store.state[FREE + size_class]
    store.state[FREE + size_class] = block


@njit(cache=True)
def _class_of(length):  # type: ignore[no-untyped-def]
    c = 0
    while (2 << c) < length:
        c += 1
    return c


@njit(cache=True)
def _count(store, key, token):  # type: ignore[no-untyped-def]
    """Count `token` as a follower of the context `key`."""
    slots, pool = store.slots, store.pool
    i = _find(slots, key)
    if slots[i, 2] == 0:
        slots[i, 0] = np.int32(key & np.uint64(0x7FFFFFFF))
        slots[i, 1] = token
        slots[i, 2] = 1
        slots[i, 3] = np.int32((key >> np.uint64(33)) & np.uint64(0xFFFFFF)) << 6
        store.state[USED] += 1
        return
    length = slots[i, 3] & 63
    slots[i, 2] += 1
    if length == 0:
        if slots[i, 1] == token:
            return
        block = _allocate(store, 0)
        pool[block] = np.int64(slots[i, 1]) | (np.int64(slots[i, 2] - 1) << 32)
        slots[i, 1] = block
        slots[i, 3] += 1
        length = 1
    block = slots[i, 1]
    at = 0
    while at < length and (pool[block + at] & 0xFFFFFFFF) != token:
        at += 1
    if at == length:
        if length == FANOUT:  # the last one, rarest and oldest, makes room
            at = FANOUT - 1
        else:
            size = _class_of(length)
            if length == 2 << size:
                bigger = _allocate(store, size + 1)
                for j in range(length):
                    pool[bigger + j] = pool[block + j]
                _release(store, block, size)
                slots[i, 1] = block = bigger
            slots[i, 3] += 1
        entry = np.int64(token) | (np.int64(1) << 32)
    else:
        entry = pool[block + at] + (np.int64(1) << 32)
    while at > 0 and (pool[block + at - 1] >> 32) <= (entry >> 32):
        pool[block + at] = pool[block + at - 1]
        at -= 1
    pool[block + at] = entry


@njit(cache=True)
def _uncount(store, key, token):  # type: ignore[no-untyped-def]
    """Take back one `_count`; a follower that had lost its place in a full list is only taken off the total."""
    slots, pool = store.slots, store.pool
    i = _find(slots, key)
    if slots[i, 2] == 0:
        return
    slots[i, 2] -= 1
    length, block = slots[i, 3] & 63, slots[i, 1]
    if length > 0:
        at = 0
        while at < length and (pool[block + at] & 0xFFFFFFFF) != token:
            at += 1
        if at < length:
            entry = pool[block + at] - (np.int64(1) << 32)
            left = (entry >> 32) > 0
            while at + 1 < length and (not left or (pool[block + at + 1] >> 32) > (entry >> 32)):
                pool[block + at] = pool[block + at + 1]
                at += 1
            if left:
                pool[block + at] = entry
            else:
                _shorten(store, i, length)
    if slots[i, 2] == 0:
        _close_gap(store, i)


@njit(cache=True)
def _shorten(store, i, length):  # type: ignore[no-untyped-def]
    """Drop the last of `length` followers of slot `i`; a list that fits into half its block moves to a smaller one."""
    slots, pool, block, size = store.slots, store.pool, store.slots[i, 1], _class_of(length)
    slots[i, 3] -= 1
    if length == 1:
        _release(store, block, size)
        slots[i, 2] = 0  # what is left of the total belongs to followers that had lost their place
    elif length - 1 == 1 << size and size > 0:
        smaller = _allocate(store, size - 1)
        for j in range(length - 1):
            pool[smaller + j] = pool[block + j]
        _release(store, block, size)
        slots[i, 1] = smaller


@njit(cache=True)
def _close_gap(store, gap):  # type: ignore[no-untyped-def]
    """Empty a slot and move back what had been displaced over it."""
    slots, mask = store.slots, len(store.slots) - 1
    store.state[USED] -= 1
    i = gap
    while True:
        i = (i + 1) & mask
        if slots[i, 2] == 0:
            break
        home = np.int64(slots[i, 0]) & mask
        if ((i - home) & mask) >= ((i - gap) & mask):
            slots[gap] = slots[i]
            gap = i
    slots[gap, 2] = 0


@njit(cache=True)
def _match_hash(text, position, start):  # type: ignore[no-untyped-def]
    """Hash of the MATCH tokens before `position`, 0 if there are fewer."""
    mask = len(text) - 1
    h = np.uint64(1)
    for back in range(1, MATCH + 1):
        at = position - back
        if at < start or text[at & mask] < 0:
            return np.uint64(0)
        h = _mix(h, text[at & mask])
    return h | np.uint64(1)


@njit(cache=True)
def _head(store, h):  # type: ignore[no-untyped-def]
    return np.int64(h >> np.uint64(20)) & (len(store.heads) - 1)


@njit(cache=True)
def _push(store, token, keys):  # type: ignore[no-untyped-def]
    """Append `token` to the text; counted unless it is a separator."""
    position = store.state[END]
    store.text[position & (len(store.text) - 1)] = token
    store.state[END] = position + 1
    if token < 0:
        return
    for order in range(_keys(store, position, keys)):
        _count(store, keys[order], token)
    h = _match_hash(store.text, position, store.state[START])
    if h != 0:
        store.heads[_head(store, h)] = np.int32(position & 0x7FFFFFFF)


@njit(cache=True)
def _evict(store, keys):  # type: ignore[no-untyped-def]
    """Forget the oldest token, and the counts that its text's next ones have from contexts reaching back to it."""
    start, mask = store.state[START], len(store.text) - 1
    last = min(start + ORDERS, store.state[END])
    for position in range(start, last):
        token = store.text[position & mask]
        if token < 0:
            break
        n = _keys(store, position, keys)
        order = position - start
        if order < n:
            _uncount(store, keys[order], token)
    store.state[START] = start + 1


@njit(cache=True)
def _follow(store, text, position, start, match):  # type: ignore[no-untyped-def]
    """Move `match`, [position, length] in the store, past the token at `position - 1` of `text`; find one if lost."""
    mask = len(store.text) - 1
    if match[1] > 0 and store.state[START] <= match[0] < store.state[END]:
        if store.text[match[0] & mask] == text[(position - 1) & (len(text) - 1)]:
            match[0] += 1
            match[1] += 1
            return
    match[1] = 0
    h = _match_hash(text, position, start)
    if h == 0:
        return
    at = np.int64(store.heads[_head(store, h)])
    at += (store.state[END] - 1 - at) & ~np.int64(0x7FFFFFFF)  # heads hold the low 31 bits
    length = 0
    while length < LONGEST and at - length > store.state[START] and position - length > start:
        if store.text[(at - 1 - length) & mask] != text[(position - 1 - length) & (len(text) - 1)]:
            break
        length += 1
    if length >= MATCH and at < store.state[END]:
        match[0], match[1] = at, length


@njit(cache=True, inline="always")
def _next_of(store, match):  # type: ignore[no-untyped-def]
    """The token that the match says comes next, -1 if none."""
    if match[1] == 0 or match[0] < store.state[START] or match[0] >= store.state[END]:
        return np.int32(-1)
    return store.text[match[0] & (len(store.text) - 1)]


@njit(cache=True, inline="always")
def _match_bucket(length):  # type: ignore[no-untyped-def]
    return min(length, 16) if length < 24 else (17 if length < 32 else 18)


@njit(cache=True)
def _bucket(store, i):  # type: ignore[no-untyped-def]
    """How much a context has been seen (8 steps), and how sure it is of its first follower (4 steps)."""
    total = store.slots[i, 2]
    if total <= 4:
        seen = total - 1
    elif total <= 8:
        seen = 4
    elif total <= 16:
        seen = 5
    else:
        seen = 6 if total <= 64 else 7
    share = 1.0
    if store.slots[i, 3] & 63:
        share = (store.pool[store.slots[i, 1]] >> 32) / total
    return 4 * seen + (share > 0.3) + (share > 0.6) + (share > 0.95)


@njit(cache=True)
def _lookup(stores, keys, n, found):  # type: ignore[no-untyped-def]
    """Fill found[2 * order + store] with slots, -1 where the context is unknown (so are then all longer ones)."""
    found[:] = -1
    for s in range(2):
        for order in range(n):
            i = _find(stores[s].slots, keys[order])
            if stores[s].slots[i, 2] == 0:
                break
            found[2 * order + s] = i


@njit(cache=True)
def _share(store, i, token):  # type: ignore[no-untyped-def]
    """How often, of its occurrences, the context in slot `i` was followed by `token`."""
    length, block = store.slots[i, 3] & 63, store.slots[i, 1]
    if length == 0:
        return 1.0 if block == token else 0.0
    for at in range(block, block + length):
        if store.pool[at] & 0xFFFFFFFF == token:
            return (store.pool[at] >> 32) / store.slots[i, 2]
    return 0.0


@njit(cache=True)
def _learn(stores, weights, matches, keys, n, token, found, bucket, share, mixed):  # type: ignore[no-untyped-def]
    """One step of online EM: a component's weight moves towards the chance that it is what produced `token`."""
    _lookup(stores, keys, n, found)
    below = FLOOR
    for c in range(COMPONENTS):
        store = stores[c & 1]
        bucket[c] = -1
        if c < 2 * ORDERS:
            if found[c] >= 0:
                bucket[c] = _bucket(store, found[c])
                share[c] = _share(store, found[c], token)
        elif _next_of(store, matches[c & 1]) >= 0:
            bucket[c] = _match_bucket(matches[c & 1, 1])
            share[c] = 1.0 if _next_of(store, matches[c & 1]) == token else 0.0
        if bucket[c] >= 0:
            weight = weights[c, bucket[c], 0]
            below += weight * (share[c] - below)
        mixed[c] = below
    chance = 1.0
    for c in range(COMPONENTS - 1, -1, -1):
        if bucket[c] >= 0:
            cell = weights[c, bucket[c]]
            blame = cell[0] * share[c] / mixed[c]
            cell[1] += chance
            cell[0] += chance * max(1 / (cell[1] + PRIOR), RATE) * (blame - cell[0])
            chance *= 1 - blame
            if chance < 1e-3:
                break


@njit(cache=True)
def append(own, shared, weights, matches, tokens, learn):  # type: ignore[no-untyped-def]
    """Append to a request's text until its store is full; returns how many tokens were. With `learn` the weights are
    adjusted to what came. weights: [COMPONENTS, BUCKETS, 2] float64, weight and how often it was adjusted.
    matches: [2, 2] int64, where the shared and the own text agree with the end of the request's, and for how long.
    """
    keys, found = np.empty(ORDERS, np.uint64), np.empty(2 * ORDERS, np.int64)
    bucket, share, mixed = np.empty(COMPONENTS, np.int64), np.empty(COMPONENTS), np.empty(COMPONENTS)
    stores = (shared, own)
    for done in range(len(tokens)):
        if is_full(own):
            return done
        if learn:
            n = _keys(own, own.state[END], keys)
            _learn(stores, weights, matches, keys, n, tokens[done], found, bucket, share, mixed)
        _push(own, tokens[done], keys)
        for s in range(2):
            _follow(stores[s], own.text, own.state[END], own.state[START], matches[s])
    return len(tokens)


@njit(cache=True)
def is_full(store):  # type: ignore[no-untyped-def]
    """Whether one more token might not fit into the arrays."""
    live = store.state[END] - store.state[START]
    return (
        4 * (store.state[USED] + ORDERS) > 3 * len(store.slots)
        or store.state[TOP] + ROOM > len(store.pool)
        or live + 1 >= len(store.text)
    )


@njit(cache=True)
def remember(store, tokens, bound):  # type: ignore[no-untyped-def]
    """Append a finished text to the shared store, the oldest tokens making room beyond `bound`; returns as `append`."""
    keys = np.empty(ORDERS, np.uint64)
    for done in range(len(tokens)):
        while store.state[END] - store.state[START] >= bound:
            _evict(store, keys)
        if is_full(store):
            return done
        _push(store, tokens[done], keys)
    return len(tokens)


@njit(cache=True)
def rehash(slots, bigger):  # type: ignore[no-untyped-def]
    """Copy a table of contexts into a larger, empty one."""
    mask = len(bigger) - 1
    for i in range(len(slots)):
        if slots[i, 2]:
            j = np.int64(slots[i, 0]) & mask
            while bigger[j, 2]:
                j = (j + 1) & mask
            bigger[j] = slots[i]


@njit(cache=True)
def _offer(token, chance, tokens, chances, index, n):  # type: ignore[no-untyped-def]
    """Add `chance` to a candidate. index: [256] int32, a hash table of candidate number + 1."""
    i = token & 255
    while index[i]:
        if tokens[index[i] - 1] == token:
            chances[index[i] - 1] += chance
            return n
        i = (i + 1) & 255
    if n < len(tokens):
        index[i] = n + 1
        tokens[n] = token
        chances[n] = chance
        n += 1
    return n


@njit(cache=True)
def _predict(stores, weights, matches, keys, n, cutoff, found, tokens, chances, index):  # type: ignore[no-untyped-def]
    """Candidates for the next token and their chances; what all together has less than `cutoff` is left out."""
    _lookup(stores, keys, n, found)
    index[:] = 0
    count, left = 0, 1.0
    for c in range(COMPONENTS - 1, -1, -1):
        store = stores[c & 1]
        if c >= 2 * ORDERS:
            token = _next_of(store, matches[c & 1])
            if token < 0:
                continue
            weight = weights[c, _match_bucket(matches[c & 1, 1]), 0]
            count = _offer(token, left * weight, tokens, chances, index, count)
        elif found[c] >= 0:
            slot = store.slots[found[c]]
            weight = weights[c, _bucket(store, found[c]), 0]
            length = slot[3] & 63
            if length == 0:
                count = _offer(slot[1], left * weight, tokens, chances, index, count)
            for at in range(slot[1], slot[1] + min(length, LOOK)):
                entry = store.pool[at]
                chance = left * weight * (entry >> 32) / slot[2]
                count = _offer(entry & 0xFFFFFFFF, chance, tokens, chances, index, count)
        else:
            continue
        left *= 1 - weight
        if left < cutoff:
            break
    return count


@njit(cache=True)
def draft(own, shared, weights, matches, continuation, budget, depth, least, tokens, parents, confidence):  # type: ignore[no-untyped-def]
    """Fill the arrays of a tree, likeliest node first, up to `budget` nodes (root included); returns how many."""
    stores = (shared, own)
    end, tail = own.state[END], np.full(TAIL, -1, np.int32)
    for i in range(TAIL):
        back = TAIL - i - len(continuation)  # of the text's end
        if back <= 0:
            tail[i] = continuation[-back]
        elif back <= end:
            tail[i] = own.text[(end - back) & (len(own.text) - 1)]
    match = np.zeros((budget, 2, 2), np.int64)
    match[0] = matches
    for at in range(max(TAIL - len(continuation), MATCH), TAIL):
        for s in range(2):
            _follow(stores[s], tail, at + 1, 0, match[0, s])
    recent = np.full((budget, ORDERS - 1), -1, np.int32)
    for back in range(ORDERS - 1):
        recent[0, back] = tail[TAIL - 1 - back]
    level = np.zeros(budget, np.int64)
    keys, found = np.empty(ORDERS, np.uint64), np.empty(2 * ORDERS, np.int64)
    offered, chances, index = np.empty(128, np.int32), np.empty(128), np.empty(256, np.int32)
    open_token, open_parent, open_chance = np.empty(budget, np.int32), np.empty(budget, np.int32), np.empty(budget)
    waiting, lowest = 0, 0
    tokens[0], parents[0], confidence[0] = tail[TAIL - 1], -1, 1.0
    node, nodes = 0, 1
    while nodes < budget:
        room = budget - nodes
        if level[node] < depth:
            keys[0] = np.uint64(0x51ED270B)
            n = 1
            while n < ORDERS and recent[node, n - 1] >= 0:
                keys[n] = _mix(keys[n - 1], recent[node, n - 1])
                n += 1
            bar = open_chance[lowest] if waiting >= room else least
            cutoff = CARELESS * bar / confidence[node]
            count = 0
            if confidence[node] > bar:
                count = _predict(stores, weights, match[node], keys, n, cutoff, found, offered, chances, index)
            for i in range(count):
                chance = confidence[node] * chances[i]
                if waiting < room:
                    place = waiting
                    waiting += 1
                elif chance > open_chance[lowest]:
                    place = lowest
                else:
                    continue
                open_token[place], open_parent[place], open_chance[place] = offered[i], node, chance
                if waiting >= room:
                    lowest = np.argmin(open_chance[:waiting])
        if waiting == 0:
            break
        best = np.argmax(open_chance[:waiting])
        if open_chance[best] < least:
            break
        node, parent = nodes, open_parent[best]
        nodes += 1
        tokens[node], parents[node] = open_token[best], parent
        confidence[node] = min(open_chance[best], confidence[parent])
        level[node] = level[parent] + 1
        recent[node, 0] = tokens[node]
        recent[node, 1:] = recent[parent, :-1]
        for s in range(2):
            if _next_of(stores[s], match[parent, s]) == tokens[node]:
                match[node, s, 0] = match[parent, s, 0] + 1
                match[node, s, 1] = match[parent, s, 1] + 1
        waiting -= 1
        open_token[best], open_parent[best] = open_token[waiting], open_parent[waiting]
        open_chance[best] = open_chance[waiting]
        if waiting:
            lowest = np.argmin(open_chance[:waiting])
    return nodes
