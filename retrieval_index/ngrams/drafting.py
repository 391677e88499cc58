"""Trees drafted from a request's three stores, likeliest node first."""

from __future__ import annotations

import numpy as np

from retrieval_index.ngrams.candidates import offer, offer_followers, with_noise
from retrieval_index.ngrams.contexts import EMPTY, look_up, mix
from retrieval_index.ngrams.kernel import kernel
from retrieval_index.ngrams.matches import MATCH, follow, next_of
from retrieval_index.ngrams.mixture import bucket_of, match_bucket_of
from retrieval_index.ngrams.store import END, ORDERS, PUBLIC_MATCH, STORES, parts

HOPE = 0.5  # a node is expanded only if a follower of this chance would get into the tree
FAINT = 0.1  # one context offers followers down to this fraction of the chance that would get into the tree
CARELESS = 0.5  # candidates' chances may lack this fraction of the chance that would get into the tree
TAIL = 64  # tokens before a draft that are looked at; a power of two


@kernel
def draft(  # type: ignore[no-untyped-def]
    own_arena,
    own,
    memory_arena,
    memory,
    public_arena,
    public,
    weights,
    continuation,
    depth,
    least,
    noise,
    temperature,
    tree,
    confidence,
):
    """Fill `tree`, [2, budget] int32: tokens and parents, and `confidence`, [budget] float32, likeliest node first.

    Returns the number of nodes, root included. Nodes less likely than `least` are left out. noise: [depth] uint64, the
    keys of the target's noise for the tokens after the root. temperature: 0 to 1, how much of it counts.
    """
    o_slots, o_pool, o_text, o_heads = parts(own_arena, own)
    m_slots, m_pool, m_text, m_heads = parts(memory_arena, memory)
    p_slots, p_pool, p_text, p_heads = parts(public_arena, public)
    budget = tree.shape[1]
    end, tail = own[END], np.full(TAIL, -1, np.int32)
    for i in range(TAIL):
        back = TAIL - i - len(continuation)  # from the text's end
        if back <= 0:
            tail[i] = continuation[len(continuation) - TAIL + i]
        elif back <= end:
            tail[i] = o_text[(end - back) & (len(o_text) - 1)]
    match = np.zeros((budget, 2 * STORES), np.int64)  # in each store: where, how long
    for j in range(2 * STORES):
        match[0, j] = own[PUBLIC_MATCH + j]
    for at in range(max(TAIL - len(continuation), MATCH), TAIL):
        match[0, 0], match[0, 1] = follow(p_text, p_heads, public, tail, at + 1, 0, match[0, 0], match[0, 1])
        match[0, 2], match[0, 3] = follow(m_text, m_heads, memory, tail, at + 1, 0, match[0, 2], match[0, 3])
        match[0, 4], match[0, 5] = follow(o_text, o_heads, own, tail, at + 1, 0, match[0, 4], match[0, 5])
    recent = np.full((budget, ORDERS), -1, np.int32)
    for back in range(ORDERS):
        recent[0, back] = tail[TAIL - 1 - back]
    level = np.zeros(budget, np.int64)
    keys, found = np.empty(ORDERS, np.uint64), np.empty(STORES * ORDERS, np.int64)
    keys[0] = EMPTY
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
                keys[n] = mix(keys[n - 1], recent[node, n - 1])
                n += 1
            look_up(p_slots, keys, n, found, 0)
            look_up(m_slots, keys, n, found, 1)
            look_up(o_slots, keys, n, found, 2)
            left, cutoff, faint, count = here, CARELESS * bar, FAINT * bar, 0
            token = next_of(o_text, own, match[node, 4], match[node, 5])
            if token >= 0:
                weight = weights[STORES * ORDERS + 2, match_bucket_of(match[node, 5]), 0]
                count = offer(np.int64(token), left * weight, tokens, chances, index, count)
                left *= 1 - weight
            token = next_of(m_text, memory, match[node, 2], match[node, 3])
            if token >= 0:
                weight = weights[STORES * ORDERS + 1, match_bucket_of(match[node, 3]), 0]
                count = offer(np.int64(token), left * weight, tokens, chances, index, count)
                left *= 1 - weight
            token = next_of(p_text, public, match[node, 0], match[node, 1])
            if token >= 0:
                weight = weights[STORES * ORDERS, match_bucket_of(match[node, 1]), 0]
                count = offer(np.int64(token), left * weight, tokens, chances, index, count)
                left *= 1 - weight
            for order in range(n - 1, -1, -1):
                i = found[STORES * order + 2]
                if i >= 0 and left > cutoff:
                    weight = weights[STORES * order + 2, bucket_of(o_slots, o_pool, i), 0]
                    count = offer_followers(o_slots, o_pool, i, left * weight, faint, tokens, chances, index, count)
                    left *= 1 - weight
                i = found[STORES * order + 1]
                if i >= 0 and left > cutoff:
                    weight = weights[STORES * order + 1, bucket_of(m_slots, m_pool, i), 0]
                    count = offer_followers(m_slots, m_pool, i, left * weight, faint, tokens, chances, index, count)
                    left *= 1 - weight
                i = found[STORES * order]
                if i >= 0 and left > cutoff:
                    weight = weights[STORES * order, bucket_of(p_slots, p_pool, i), 0]
                    count = offer_followers(p_slots, p_pool, i, left * weight, faint, tokens, chances, index, count)
                    left *= 1 - weight
            index[:] = 0
            if temperature > 0:
                with_noise(tokens, chances, count, here, noise[level[node]], temperature)
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
        if next_of(p_text, public, match[parent, 0], match[parent, 1]) == token:
            match[node, 0], match[node, 1] = match[parent, 0] + 1, match[parent, 1] + 1
        if next_of(m_text, memory, match[parent, 2], match[parent, 3]) == token:
            match[node, 2], match[node, 3] = match[parent, 2] + 1, match[parent, 3] + 1
        if next_of(o_text, own, match[parent, 4], match[parent, 5]) == token:
            match[node, 4], match[node, 5] = match[parent, 4] + 1, match[parent, 5] + 1
        waiting -= 1
        open_token[best], open_parent[best] = open_token[waiting], open_parent[waiting]
        open_chance[best] = open_chance[waiting]
        if lowest == waiting:  # it has just moved
            lowest = best
        if lowest >= waiting:
            lowest = 0
    return nodes
