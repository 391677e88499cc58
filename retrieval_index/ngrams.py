"""Compiled kernels of the session index: counted n-grams in flat arrays, and trees drafted from them.

A store is one text (a request's own, or the shared cache of finished answers) with, for each of its contexts of 0 to 4
tokens, a short list of the tokens that followed it, most frequent first, the later of two equals first. Longer contexts
are served by a *match*: the latest place whose last 6 tokens were the same, followed token by token for as long as it
agrees with the text.

All kernels but `bits_of`, which may never change, stay in this one file: numba's cache notices a change of the file a
kernel stands in, and of no other.
Arrays are passed one by one and never sliced in a loop: each view costs an atomic reference count.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.noise_bits import UNIT, bits_of

ORDERS = 5  # contexts of 0, 1, 2, 3 and 4 tokens
MATCH = 6  # tokens that must agree before a match is followed
LONGEST = 32  # a match found is compared this far back
SEPARATOR = -1  # stands between texts: no context reaches across it
FANOUT = 32  # most followers kept for a context
LOOK = 16  # most followers looked at
COMPONENTS = 2 * ORDERS + 2  # (order, store) from short to long, then the matches; even: shared, odd: own text
BUCKETS = 32
HOPE = 0.5  # a node is asked for followers only if one of this chance would get into the tree
FAINT = 0.1  # and one context's share of them this fraction
FLOOR = 1e-5  # chance of a token never seen
RATE, PRIOR = 0.01, 20.0  # slowest step of the weights, and how many observations the first weight stands for
CARELESS = 0.5  # candidates' chances may lack this fraction of what would get a node into the tree
SLACK = 0.3  # how far, at temperature 1, the error of a logarithm of a chance goes beyond none: see `_with_noise`
TAIL = 64  # tokens before a draft that are looked at; a power of two
ROOM = 64 * ORDERS  # pool entries that one token may need

START, END, USED, TOP = 0, 1, 2, 3  # of the text, slots in use, end of the pool's used part
SLOTS, POOL, RING, HEADS = 4, 5, 6, 7  # sizes of the parts of the arena
FREE = 8  # FREE + c: first free block of 2 << c followers, -1: none
SHARED_MATCH, OWN_MATCH = 13, 15  # position behind the agreeing tokens, and how many agree
STATE = 17

_jit = njit(cache=True, error_model="numpy")
_inline = njit(cache=True, error_model="numpy", inline="always")


class Store(NamedTuple):
    """arena: int32, one after the other
    slots [SLOTS, 4], a hash table of contexts: key, follower or block, occurrences, key and list length (0: the one
    follower itself stands in the slot); pool [POOL, 2], blocks of followers: token, count; text [RING];
    heads [HEADS], hash of 6 tokens -> the position behind their latest occurrence.
    state: [STATE] int64, see the names above. One array each: every
    array handed to a kernel costs half a microsecond.
    """

    arena: NDArray[np.int32]
    state: NDArray[np.int64]


def new_store(slots: int, pool: int, ring: int, heads: int) -> Store:
    """An empty store; all but `pool` are powers of two. Memory becomes resident only as it fills."""
    state = np.zeros(STATE, np.int64)
    state[SLOTS : HEADS + 1] = slots, pool, ring, heads
    state[FREE:SHARED_MATCH] = -1
    return Store(np.zeros(4 * slots + 2 * pool + ring + heads, np.int32), state)


@_inline
def parts(arena, state):  # type: ignore[no-untyped-def]
    """The arrays of an arena: slots, pool, text, heads."""
    a, b, c = 4 * state[SLOTS], 4 * state[SLOTS] + 2 * state[POOL], 4 * state[SLOTS] + 2 * state[POOL] + state[RING]
    return arena[:a].reshape((-1, 4)), arena[a:b].reshape((-1, 2)), arena[b:c], arena[c:]


@_inline
def _mix(h, token):  # type: ignore[no-untyped-def]
    h = (h ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(31))


@_inline
def _low(key):  # type: ignore[no-untyped-def]
    return np.int32(key & np.uint64(0x7FFFFFFF))


@_inline
def _high(key):  # type: ignore[no-untyped-def]
    return np.int32((key >> np.uint64(33)) & np.uint64(0xFFFFFF))


@_jit
def _find(slots, key):  # type: ignore[no-untyped-def]
    """The slot of `key`, or of the gap where it would be."""
    mask = len(slots) - 1
    low, high = _low(key), _high(key)
    i = np.int64(low) & mask
    while slots[i, 2] != 0 and (slots[i, 0] != low or (slots[i, 3] >> 6) != high):
        i = (i + 1) & mask
    return i


@_jit
def _keys(text, start, position, keys):  # type: ignore[no-untyped-def]
    """Fill keys[o] with the context of o tokens before `position`; returns how many there are."""
    mask = len(text) - 1
    keys[0] = np.uint64(0x51ED270B)
    for order in range(1, ORDERS):
        at = position - order
        if at < start or text[at & mask] < 0:
            return order
        keys[order] = _mix(keys[order - 1], text[at & mask])
    return ORDERS


@_jit
def _class_of(length):  # type: ignore[no-untyped-def]
    c = 0
    while (2 << c) < length:
        c += 1
    return c


@_jit
def _move(pool, state, block, length, old, new):  # type: ignore[no-untyped-def]
    """Move a list to a block of another size class (old -1: there is none yet); returns the new block."""
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


@_jit
def _count(slots, pool, state, key, token):  # type: ignore[no-untyped-def]
    """Count `token` as a follower of the context `key`."""
    i = _find(slots, key)
    total = slots[i, 2]
    slots[i, 2] = total + 1
    if total == 0:
        slots[i, 0], slots[i, 1], slots[i, 3] = _low(key), token, _high(key) << 6
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
        at = FANOUT - 1  # the last one, rarest and oldest, makes room
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


@_jit
def _uncount(slots, pool, state, key, token):  # type: ignore[no-untyped-def]
    """Take back one `_count`; a follower that had lost its place in a full list is only taken off the total."""
    i = _find(slots, key)
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
        if count == 0:  # it is the last now
            _shorten(slots, pool, state, i, length)
    if slots[i, 2] == 0:
        _close_gap(slots, state, i)


@_jit
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


@_jit
def _close_gap(slots, state, gap):  # type: ignore[no-untyped-def]
    """Empty a slot and move back what had been displaced over it."""
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


@_jit
def _match_hash(text, position, start):  # type: ignore[no-untyped-def]
    """Hash of the MATCH tokens before `position`, 0 if there are fewer."""
    mask = len(text) - 1
    h = np.uint64(1)
    for back in range(1, MATCH + 1):
        at = position - back
        if at < start or text[at & mask] < 0:
            return np.int64(0)
        h = _mix(h, text[at & mask])
    return np.int64(h >> np.uint64(20)) | 1 << 44


@_jit
def _push(slots, pool, text, heads, state, token, keys):  # type: ignore[no-untyped-def]
    """Append `token` to the text and count it, unless it is a separator."""
    position = state[END]
    text[position & (len(text) - 1)] = token
    state[END] = position + 1
    if token < 0:
        return
    for order in range(_keys(text, state[START], position, keys)):
        _count(slots, pool, state, keys[order], token)
    h = _match_hash(text, position, state[START])
    if h:
        heads[h & (len(heads) - 1)] = np.int32(position & 0x7FFFFFFF)


@_jit
def _evict(slots, pool, text, state, keys):  # type: ignore[no-untyped-def]
    """Forget the oldest token, and the counts of the contexts that begin with it."""
    start = state[START]
    for order in range(min(ORDERS, state[END] - start)):
        token = text[(start + order) & (len(text) - 1)]
        if token < 0:
            break
        _keys(text, start, start + order, keys)
        _uncount(slots, pool, state, keys[order], token)
    state[START] = start + 1


@_jit
def _follow(text, heads, state, tail, position, start, match, length):  # type: ignore[no-untyped-def]
    """Move a match (where, how long) past the token at `position - 1` of `tail`, or find one if it is lost."""
    mask, tail_mask = len(text) - 1, len(tail) - 1
    if length > 0 and state[START] <= match < state[END] and text[match & mask] == tail[(position - 1) & tail_mask]:
        return match + 1, length + 1
    h = _match_hash(tail, position, start)
    if h == 0:
        return np.int64(0), np.int64(0)
    at = np.int64(heads[h & (len(heads) - 1)])
    at += (state[END] - 1 - at) & ~np.int64(0x7FFFFFFF)  # heads hold the low 31 bits
    length = np.int64(0)
    while length < LONGEST and at - length > state[START] and position - length > start:
        if text[(at - 1 - length) & mask] != tail[(position - 1 - length) & tail_mask]:
            break
        length += 1
    if length < MATCH or at >= state[END]:
        return np.int64(0), np.int64(0)
    return at, length


@_inline
def _next_of(text, state, match, length):  # type: ignore[no-untyped-def]
    """The token that a match says comes next, -1 if it says nothing."""
    token = np.int32(-1)
    if length > 0 and match >= state[START] and match < state[END]:
        token = text[match & (len(text) - 1)]
    return token


@_inline
def _match_bucket(length):  # type: ignore[no-untyped-def]
    return min(length, 16) + (length >= 24) + (length >= 32)


@_jit
def _bucket(slots, pool, i):  # type: ignore[no-untyped-def]
    """How much a context has been seen (8 steps), and how sure it is of its first follower (4 steps)."""
    total = slots[i, 2]
    seen = total - 1 if total <= 4 else 4 + (total > 8) + (total > 16) + (total > 64)
    share = 1.0
    if slots[i, 3] & 63:
        share = pool[slots[i, 1], 1] / total
    return 4 * seen + (share > 0.3) + (share > 0.6) + (share > 0.95)


@_jit
def _lookup(slots, keys, n, found, store):  # type: ignore[no-untyped-def]
    """Fill found[2 * order + store] with slots, -1 where the context is unknown (so are then all longer ones)."""
    for order in range(ORDERS):
        found[2 * order + store] = -1
    for order in range(n):
        i = _find(slots, keys[order])
        if slots[i, 2] == 0:
            break
        found[2 * order + store] = i


@_jit
def _share(slots, pool, i, token):  # type: ignore[no-untyped-def]
    """How often, of its occurrences, the context in slot `i` was followed by `token`."""
    length, block = slots[i, 3] & 63, np.int64(slots[i, 1])
    if length == 0:
        return 1.0 if block == token else 0.0
    for at in range(block, block + length):
        if pool[at, 0] == token:
            return pool[at, 1] / slots[i, 2]
    return 0.0


@_jit
def _adjust(weights, bucket, share):  # type: ignore[no-untyped-def]
    """One step of online EM: a component's weight moves towards the chance that it is what produced the token."""
    mixed = np.empty(COMPONENTS)
    below = FLOOR
    for c in range(COMPONENTS):
        if bucket[c] >= 0:
            below += weights[c, bucket[c], 0] * (share[c] - below)
        mixed[c] = below
    chance = 1.0
    for c in range(COMPONENTS - 1, -1, -1):
        b = bucket[c]
        if b >= 0:
            weight = weights[c, b, 0]
            blame = weight * share[c] / mixed[c]
            weights[c, b, 1] += chance
            weights[c, b, 0] = weight + chance * max(1 / (weights[c, b, 1] + PRIOR), RATE) * (blame - weight)
            chance *= 1 - blame
            if chance < 1e-3:
                break


@_jit
def is_full(state):  # type: ignore[no-untyped-def]
    """Whether one more token might not fit."""
    return (
        4 * (state[USED] + ORDERS) > 3 * state[SLOTS]
        or state[TOP] + ROOM > state[POOL]
        or state[END] - state[START] + 1 >= state[RING]
    )


@_jit
def append(own_arena, own, shared_arena, shared, weights, tokens, learn):  # type: ignore[no-untyped-def]
    """Append to a request's text until its store is full; returns how many tokens were. With `learn` the weights are
    adjusted to what came. weights: [COMPONENTS, BUCKETS, 2] float64, weight and how often it was adjusted.
    """
    o_slots, o_pool, o_text, o_heads = parts(own_arena, own)
    s_slots, s_pool, s_text, s_heads = parts(shared_arena, shared)
    keys, found = np.empty(ORDERS, np.uint64), np.empty(2 * ORDERS, np.int64)
    bucket, share = np.empty(COMPONENTS, np.int64), np.empty(COMPONENTS)
    for done in range(len(tokens)):
        if is_full(own):
            return done
        token = tokens[done]
        if learn:
            n = _keys(o_text, own[START], own[END], keys)
            _lookup(s_slots, keys, n, found, 0)
            _lookup(o_slots, keys, n, found, 1)
            for c in range(0, 2 * ORDERS, 2):
                bucket[c] = bucket[c + 1] = -1
                if found[c] >= 0:
                    bucket[c], share[c] = _bucket(s_slots, s_pool, found[c]), _share(s_slots, s_pool, found[c], token)
                if found[c + 1] >= 0:
                    bucket[c + 1] = _bucket(o_slots, o_pool, found[c + 1])
                    share[c + 1] = _share(o_slots, o_pool, found[c + 1], token)
            s_next = _next_of(s_text, shared, own[SHARED_MATCH], own[SHARED_MATCH + 1])
            o_next = _next_of(o_text, own, own[OWN_MATCH], own[OWN_MATCH + 1])
            bucket[2 * ORDERS] = _match_bucket(own[SHARED_MATCH + 1]) if s_next >= 0 else -1
            bucket[2 * ORDERS + 1] = _match_bucket(own[OWN_MATCH + 1]) if o_next >= 0 else -1
            share[2 * ORDERS] = 1.0 if s_next == token else 0.0
            share[2 * ORDERS + 1] = 1.0 if o_next == token else 0.0
            _adjust(weights, bucket, share)
        _push(o_slots, o_pool, o_text, o_heads, own, token, keys)
        own[SHARED_MATCH], own[SHARED_MATCH + 1] = _follow(
            s_text, s_heads, shared, o_text, own[END], own[START], own[SHARED_MATCH], own[SHARED_MATCH + 1]
        )
        own[OWN_MATCH], own[OWN_MATCH + 1] = _follow(
            o_text, o_heads, own, o_text, own[END], own[START], own[OWN_MATCH], own[OWN_MATCH + 1]
        )
    return len(tokens)


@_jit
def remember(arena, state, tokens, bound):  # type: ignore[no-untyped-def]
    """Append a finished text to the shared store, the oldest tokens making room beyond `bound`; returns as `append`."""
    slots, pool, text, heads = parts(arena, state)
    keys = np.empty(ORDERS, np.uint64)
    for done in range(len(tokens)):
        while state[END] - state[START] >= bound:
            _evict(slots, pool, text, state, keys)
        if is_full(state):
            return done
        _push(slots, pool, text, heads, state, tokens[done], keys)
    return len(tokens)


@_jit
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
    new_pool[: state[TOP]] = pool[: state[TOP]]
    bigger[:SLOTS] = state[:SLOTS]
    bigger[FREE:] = state[FREE:]
    for position in range(state[START], state[END]):
        new_text[position & (len(new_text) - 1)] = text[position & (len(text) - 1)]
        h = _match_hash(text, position, state[START])
        if h and text[position & (len(text) - 1)] >= 0:
            new_heads[h & (len(new_heads) - 1)] = np.int32(position & 0x7FFFFFFF)


@_inline
def _offer(token, chance, tokens, chances, index, n):  # type: ignore[no-untyped-def]
    """Add `chance` to a candidate. index: [256] int32, a hash table of candidate number + 1."""
    i = token & 255
    while index[i] and tokens[index[i] - 1] != token:
        i = (i + 1) & 255
    if index[i]:
        chances[index[i] - 1] += chance
    elif n < len(tokens):
        tokens[n], chances[n] = token, chance
        n += 1
        index[i] = n
    return n


@_jit
def _offer_list(slots, pool, i, scale, faint, tokens, chances, index, n):  # type: ignore[no-untyped-def]
    """Offer the followers of the context in slot `i`, down to those that it gives a chance below `faint`."""
    length, block = min(slots[i, 3] & 63, LOOK), np.int64(slots[i, 1])
    if length == 0:
        return _offer(np.int64(block), scale, tokens, chances, index, n)
    scale /= slots[i, 2]
    for at in range(block, block + length):
        chance = scale * pool[at, 1]
        if chance < faint:
            break
        n = _offer(np.int64(pool[at, 0]), chance, tokens, chances, index, n)
    return n


@_jit
def _with_noise(tokens, chances, count, here, key, temperature):  # type: ignore[no-untyped-def]
    """Change the candidates' chances, `here` in all, to what they are once the noise of the target's draw is known.

    The target draws the largest log p + g, and g is known. If the logarithms of our chances q missed those of p by
    independent Gumbel errors of scale b, a token would win with a chance in proportion to (q e^g)^(1/b): see
    `drafters.ranking`. What no candidate covers has one weight, the mean of (r e^g)^(1/b). Between temperatures 0 and
    1 noise counts by its share; b = 1 + SLACK at 1 has the least log loss on answers of SmolLM2-135M.
    """
    power = 1 / (1 + SLACK * temperature)
    covered, total = 0.0, 0.0
    for i in range(count):
        share = chances[i] / here
        covered += share
        noise = -math.log(-math.log((np.float64(bits_of(key, tokens[i])) + 0.5) * UNIT))
        chances[i] = math.exp((math.log(share) + temperature * noise) * power)
        total += chances[i]
    total += max(1 - covered, FLOOR) ** power * math.gamma(1 - temperature * power)
    for i in range(count):
        chances[i] *= here / total


@_jit
def draft(  # type: ignore[no-untyped-def]
    own_arena, own, shared_arena, shared, weights, continuation, depth, least, noise, temperature, tree, confidence
):
    """Fill `tree`, [2, budget] int32: tokens and parents, and `confidence`, [budget] float32, likeliest node first.

    Returns the number of nodes, root included. Nodes less likely than `least` are left out. noise: [depth] uint64, the
    keys of the target's noise behind the root and below. temperature: 0 to 1, how much of it counts.
    """
    o_slots, o_pool, o_text, o_heads = parts(own_arena, own)
    s_slots, s_pool, s_text, s_heads = parts(shared_arena, shared)
    budget = tree.shape[1]
    end, tail = own[END], np.full(TAIL, -1, np.int32)
    for i in range(TAIL):
        back = TAIL - i - len(continuation)  # of the text's end
        if back <= 0:
            tail[i] = continuation[len(continuation) - TAIL + i]
        elif back <= end:
            tail[i] = o_text[(end - back) & (len(o_text) - 1)]
    match = np.zeros((budget, 4), np.int64)  # shared and own: where, how long
    for j in range(4):
        match[0, j] = own[SHARED_MATCH + j]
    for at in range(max(TAIL - len(continuation), MATCH), TAIL):
        match[0, 0], match[0, 1] = _follow(s_text, s_heads, shared, tail, at + 1, 0, match[0, 0], match[0, 1])
        match[0, 2], match[0, 3] = _follow(o_text, o_heads, own, tail, at + 1, 0, match[0, 2], match[0, 3])
    recent = np.full((budget, ORDERS), -1, np.int32)
    for back in range(ORDERS):
        recent[0, back] = tail[TAIL - 1 - back]
    level = np.zeros(budget, np.int64)
    keys, found = np.empty(ORDERS, np.uint64), np.empty(2 * ORDERS, np.int64)
    keys[0] = np.uint64(0x51ED270B)
    tokens, chances, index = np.empty(128, np.int32), np.empty(128), np.zeros(256, np.int16)
    # candidates that wait for a place in the tree: the best `room` of all seen
    open_token, open_parent, open_chance = np.empty(budget, np.int32), np.empty(budget, np.int32), np.empty(budget)
    waiting, lowest = 0, 0
    tree[0, 0], tree[1, 0], confidence[0] = tail[TAIL - 1], -1, 1.0
    node, nodes = 0, 1
    while nodes < budget:
        room = budget - nodes
        here = np.float64(confidence[node])
        bar = open_chance[lowest] if waiting >= room else least
        if level[node] < depth and HOPE * here > bar:
            n = 1
            while n < ORDERS and recent[node, n - 1] >= 0:
                keys[n] = _mix(keys[n - 1], recent[node, n - 1])
                n += 1
            _lookup(s_slots, keys, n, found, 0)
            _lookup(o_slots, keys, n, found, 1)
            left, cutoff, faint, count = here, CARELESS * bar, FAINT * bar, 0
            token = _next_of(o_text, own, match[node, 2], match[node, 3])
            if token >= 0:
                weight = weights[2 * ORDERS + 1, _match_bucket(match[node, 3]), 0]
                count = _offer(np.int64(token), left * weight, tokens, chances, index, count)
                left *= 1 - weight
            token = _next_of(s_text, shared, match[node, 0], match[node, 1])
            if token >= 0:
                weight = weights[2 * ORDERS, _match_bucket(match[node, 1]), 0]
                count = _offer(np.int64(token), left * weight, tokens, chances, index, count)
                left *= 1 - weight
            for order in range(n - 1, -1, -1):
                i = found[2 * order + 1]
                if i >= 0 and left > cutoff:
                    weight = weights[2 * order + 1, _bucket(o_slots, o_pool, i), 0]
                    count = _offer_list(o_slots, o_pool, i, left * weight, faint, tokens, chances, index, count)
                    left *= 1 - weight
                i = found[2 * order]
                if i >= 0 and left > cutoff:
                    weight = weights[2 * order, _bucket(s_slots, s_pool, i), 0]
                    count = _offer_list(s_slots, s_pool, i, left * weight, faint, tokens, chances, index, count)
                    left *= 1 - weight
            index[:] = 0
            if temperature > 0:
                _with_noise(tokens, chances, count, here, noise[level[node]], temperature)
            for i in range(count):
                if waiting < room:
                    place = waiting
                    waiting += 1
                elif chances[i] > open_chance[lowest]:
                    place = lowest
                else:
                    continue
                open_token[place], open_parent[place], open_chance[place] = tokens[i], node, chances[i]
                if waiting >= room:
                    lowest = 0
                    for j in range(1, waiting):
                        if open_chance[j] < open_chance[lowest]:
                            lowest = j
        best = -1
        bar = least
        for j in range(waiting):
            if open_chance[j] > bar:
                best, bar = j, open_chance[j]
        if best < 0:
            break
        node, parent = nodes, open_parent[best]
        nodes += 1
        token = open_token[best]
        tree[0, node], tree[1, node] = token, parent
        confidence[node] = min(np.float32(bar), confidence[parent])
        level[node] = level[parent] + 1
        recent[node, 0] = token
        for back in range(1, ORDERS):
            recent[node, back] = recent[parent, back - 1]
        if _next_of(s_text, shared, match[parent, 0], match[parent, 1]) == token:
            match[node, 0], match[node, 1] = match[parent, 0] + 1, match[parent, 1] + 1
        if _next_of(o_text, own, match[parent, 2], match[parent, 3]) == token:
            match[node, 2], match[node, 3] = match[parent, 2] + 1, match[parent, 3] + 1
        waiting -= 1
        open_token[best], open_parent[best] = open_token[waiting], open_parent[waiting]
        open_chance[best] = open_chance[waiting]
        if lowest == waiting:  # it has just moved
            lowest = best
        if lowest >= waiting:
            lowest = 0
    return nodes
