"""Candidates after a node of a draft: tokens and their probabilities, from all known contexts of the node."""

from __future__ import annotations

import math

import numpy as np

from engine.kernels.subroutine import subroutine
from engine.sampling.noise_bits import noise_of
from retrieval_index.ngrams.mixture import FLOOR

LOOK = 16  # most followers of a context that are read
SLACK = 0.3  # 1 + SLACK is the scale of a log probability's error at temperature 1: see `with_noise`


@subroutine
def offer(token, prob, tokens, probs, index, n):  # type: ignore[no-untyped-def]
    """Add `prob` to a candidate. index: [256] int32, a hash table of candidate number + 1."""
    i = token & 255
    while index[i] and tokens[index[i] - 1] != token:
        i = (i + 1) & 255
    if index[i]:
        probs[index[i] - 1] += prob
    elif n < len(tokens):
        tokens[n], probs[n] = token, prob
        n += 1
        index[i] = n
    return n


@subroutine
def offer_followers(slots, pool, i, scale, faint, tokens, probs, index, n):  # type: ignore[no-untyped-def]
    """Offer the followers of the context in slot `i`, until their probability falls below `faint`."""
    length, block = min(slots[i, 3] & 63, LOOK), np.int64(slots[i, 1])
    if length == 0:
        return offer(np.int64(block), scale, tokens, probs, index, n)
    scale /= slots[i, 2]
    for at in range(block, block + length):
        prob = scale * pool[at, 1]
        if prob < faint:
            break
        n = offer(np.int64(pool[at, 0]), prob, tokens, probs, index, n)
    return n


@subroutine
def with_noise(tokens, probs, count, here, key, temperature):  # type: ignore[no-untyped-def]
    """Condition the candidates' probabilities, which are shares of `here`, on the noise of the target's draw.

    The target draws the token with the largest log p + g, and g is known. If log q of our probabilities q missed log p
    by independent Gumbel errors of scale b, a token would win with a probability proportional to (q e^g)^(1/b): see
    `drafters.heads.growth.ranking`. What no candidate covers has one weight, the mean of (r e^g)^(1/b). Between
    temperatures 0 and 1 noise counts by its share; b = 1 + SLACK at 1 has the least log loss on answers of
    SmolLM2-135M.
    """
    power = 1 / (1 + SLACK * temperature)
    covered, total = 0.0, 0.0
    for i in range(count):
        share = probs[i] / here
        covered += share
        probs[i] = math.exp((math.log(share) + temperature * noise_of(key, tokens[i])) * power)
        total += probs[i]
    total += max(1 - covered, FLOOR) ** power * math.gamma(1 - temperature * power)
    for i in range(count):
        probs[i] *= here / total
