"""Drafts trees from a request's three stores, likeliest node first."""

from __future__ import annotations

import numpy as np

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.candidates import offer, offer_followers, with_noise
from retrieval_index.ngrams.contexts import EMPTY, look_up, mix
from retrieval_index.ngrams.kernel import kernel
from retrieval_index.ngrams.matches import MATCH, follow, next_of
from retrieval_index.ngrams.mixture import bucket_of, match_bucket_of
from retrieval_index.ngrams.store import END, ORDERS, PUBLIC_MATCH, STORES, parts

HOPE = 0.5  # a node is expanded only if a follower of this probability would get into the tree
FAINT = 0.1  # one context offers followers down to this fraction of the probability that would get into the tree
CARELESS = 0.5  # candidates' probabilities may lack this fraction of the probability that would get into the tree
TAIL = 64  # tokens before a draft that are read; a power of two


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
    keys of the target's noise for the tokens after the root. temperature: 0 to 1, how much of the noise counts.
    """
    o_slots, o_pool, o_text, o_heads = parts(own_arena, own)
    m_slots, m_pool, m_text, m_heads = parts(memory_arena, memory)
    p_slots, p_pool, p_text, p_heads = parts(public_arena, public)
    budget = tree.shape[1]
    tail = _tail(o_text, own[END], continuation)
    match = np.zeros((budget, 2 * STORES), np.int64)  # in each store: where the match is, and how long
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
    keys, found, next_ = np.empty(ORDERS, np.uint64), np.empty(STORES * ORDERS, np.int64), np.empty(STORES, np.int64)
    keys[0] = EMPTY
    tokens, probs, index = np.empty(128, np.int32), np.empty(128), np.zeros(256, np.int16)
    # candidates that wait for a place in the tree: the best `room` of all found
    open_token, open_parent, open_prob = np.empty(budget, np.int32), np.empty(budget, np.int32), np.empty(budget)
    waiting, lowest = 0, 0
    tree[0, 0], tree[1, 0], confidence[0] = tail[TAIL - 1], -1, 1.0
    node, nodes = 0, 1
    while nodes < budget:
        room = budget - nodes
        here = np.float64(confidence[node])
        bar = open_prob[lowest] if waiting >= room else least
        if level[node] < depth and HOPE * here > bar:
            n = 1
            while n < ORDERS and recent[node, n - 1] >= 0:
                keys[n] = mix(keys[n - 1], recent[node, n - 1])
                n += 1
            look_up(p_slots, keys, n, found, 0)
            look_up(m_slots, keys, n, found, 1)
            look_up(o_slots, keys, n, found, 2)
            next_[0] = next_of(p_text, public, match[node, 0], match[node, 1])
            next_[1] = next_of(m_text, memory, match[node, 2], match[node, 3])
            next_[2] = next_of(o_text, own, match[node, 4], match[node, 5])
            count = _candidates(
                o_slots, o_pool, m_slots, m_pool, p_slots, p_pool, weights, match, node, n, found, next_,
                here, bar, tokens, probs, index,
            )  # fmt: skip
            if temperature > 0:
                with_noise(tokens, probs, count, here, noise[level[node]], temperature)
            waiting, lowest = _keep_best(
                tokens, probs, count, node, room, open_token, open_parent, open_prob, waiting, lowest
            )
        best = _likeliest(open_prob, waiting, least)
        if best < 0:
            break
        node, parent, token = nodes, open_parent[best], open_token[best]
        nodes += 1
        tree[0, node], tree[1, node] = token, parent
        confidence[node] = min(np.float32(open_prob[best]), confidence[parent])
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
        open_prob[best] = open_prob[waiting]
        if lowest == waiting:  # the last one has just moved into the gap
            lowest = best
        if lowest >= waiting:
            lowest = 0
    return nodes


@subroutine
def _tail(text, end, continuation):  # type: ignore[no-untyped-def]
    """Return [TAIL] the last tokens of the text, which ends at position `end`, and of its continuation;
    -1 before them.
    """
    tail = np.full(TAIL, -1, np.int32)
    for i in range(TAIL):
        back = TAIL - i - len(continuation)  # counted from the text's end
        if back <= 0:
            tail[i] = continuation[len(continuation) - TAIL + i]
        elif back <= end:
            tail[i] = text[(end - back) & (len(text) - 1)]
    return tail


@subroutine
def _candidates(  # type: ignore[no-untyped-def]
    o_slots,
    o_pool,
    m_slots,
    m_pool,
    p_slots,
    p_pool,
    weights,
    match,
    node,
    orders,
    found,
    next_,
    here,
    bar,
    tokens,
    probs,
    index,
):
    """Fill `tokens` and `probs` with what may follow the node, and return how many there are. A component takes its
    weight's share of what is left of the node's probability, `here`: first the matches, then the contexts, the longest
    first; in each the request's own text, then its owner's memory, then public texts.

    next_: [STORES] the token after each store's match, below 0 for none. found: of each order and store, see `look_up`.
    bar: the least probability that would get into the tree. index: zeros, and zeros again afterwards.
    """
    left, cutoff, faint, count = here, CARELESS * bar, FAINT * bar, 0
    for store in range(STORES - 1, -1, -1):
        if next_[store] >= 0:
            weight = weights[STORES * ORDERS + store, match_bucket_of(match[node, 2 * store + 1]), 0]
            count = offer(next_[store], left * weight, tokens, probs, index, count)
            left *= 1 - weight
    for order in range(orders - 1, -1, -1):
        i = found[STORES * order + 2]
        if i >= 0 and left > cutoff:
            weight = weights[STORES * order + 2, bucket_of(o_slots, o_pool, i), 0]
            count = offer_followers(o_slots, o_pool, i, left * weight, faint, tokens, probs, index, count)
            left *= 1 - weight
        i = found[STORES * order + 1]
        if i >= 0 and left > cutoff:
            weight = weights[STORES * order + 1, bucket_of(m_slots, m_pool, i), 0]
            count = offer_followers(m_slots, m_pool, i, left * weight, faint, tokens, probs, index, count)
            left *= 1 - weight
        i = found[STORES * order]
        if i >= 0 and left > cutoff:
            weight = weights[STORES * order, bucket_of(p_slots, p_pool, i), 0]
            count = offer_followers(p_slots, p_pool, i, left * weight, faint, tokens, probs, index, count)
            left *= 1 - weight
    index[:] = 0
    return count


@subroutine
def _keep_best(  # type: ignore[no-untyped-def]
    tokens, probs, count, node, room, open_token, open_parent, open_prob, waiting, lowest
):
    """Add a node's candidates to those that wait, as far as they are among the best `room`. Returns how many wait, and
    which is the least likely if there are `room`.
    """
    for i in range(count):
        if waiting < room:
            place = waiting
            waiting += 1
        elif probs[i] > open_prob[lowest]:
            place = lowest
        else:
            continue
        open_token[place], open_parent[place], open_prob[place] = tokens[i], node, probs[i]
        if waiting >= room:
            lowest = 0
            for j in range(1, waiting):
                if open_prob[j] < open_prob[lowest]:
                    lowest = j
    return waiting, lowest


@subroutine
def _likeliest(open_prob, waiting, least):  # type: ignore[no-untyped-def]
    """Return the likeliest candidate that waits, the first of equals; -1 if none is likelier than `least`."""
    best, bar = -1, least
    for j in range(waiting):
        if open_prob[j] > bar:
            best, bar = j, open_prob[j]
    return best
