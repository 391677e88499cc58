"""Weights of contexts and matches in a token's probability, learned from the tokens that came."""

from __future__ import annotations

import numpy as np

from engine.kernels.subroutine import subroutine
from retrieval_index.ngrams.store import ORDERS, STORES

COMPONENTS = STORES * (ORDERS + 1)  # (order, store) from short to long, then the matches
BUCKETS = 32
FLOOR = 1e-5  # probability of a token that was never seen
RATE, PRIOR = 0.01, 20.0  # slowest step of the weights, and how many observations the first weight stands for


@subroutine
def bucket_of(slots, pool, i):  # type: ignore[no-untyped-def]
    """Return the bucket of a context: how often it has been seen (8 steps), and how sure it is of its first follower
    (4).
    """
    total = slots[i, 2]
    seen = total - 1 if total <= 4 else 4 + (total > 8) + (total > 16) + (total > 64)
    share = 1.0
    if slots[i, 3] & 63:
        share = pool[slots[i, 1], 1] / total
    return 4 * seen + (share > 0.3) + (share > 0.6) + (share > 0.95)


@subroutine
def match_bucket_of(length):  # type: ignore[no-untyped-def]
    return min(length, 16) + (length >= 24) + (length >= 32)


@subroutine
def adjust(weights, bucket, share):  # type: ignore[no-untyped-def]
    """Make one step of online EM: a component's weight moves towards the probability that it produced the token."""
    mixed = np.empty(COMPONENTS)
    below = FLOOR
    for c in range(COMPONENTS):
        if bucket[c] >= 0:
            below += weights[c, bucket[c], 0] * (share[c] - below)
        mixed[c] = below
    prob = 1.0
    for c in range(COMPONENTS - 1, -1, -1):
        b = bucket[c]
        if b >= 0:
            weight = weights[c, b, 0]
            blame = weight * share[c] / mixed[c]
            weights[c, b, 1] += prob
            weights[c, b, 0] = weight + prob * max(1 / (weights[c, b, 1] + PRIOR), RATE) * (blame - weight)
            prob *= 1 - blame
            if prob < 1e-3:
                break
