"""Makes one draw from softmax(scores) by the Gumbel-max rule, compiled as a whole. After a forward the caches are cold,
and each of the dozen torch and numpy calls that it replaces cost ten times as much as its arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.kernels.jit_cache import cached_njit
from engine.kernels.subroutine import subroutine
from engine.sampling.argmax import NAN
from engine.sampling.noise_bits import UNIT, bits_of, noise_of

_CERTAIN = 1 - 1e-4  # far above the float32 error in `draw`, whose proof needs three times that error
_REACH = 41.0  # noise lies in [-3.61, 36.74], so a token 40.36 below the best score never wins
_NEAR = 8.0  # below the best score: of tokens further below, only those with rare noise are examined
_PART, _SEARCHED = 32, 1024  # tokens processed together


@cached_njit
def draw(key: Any, scores: Any) -> Any:
    """Return the argmax over tokens of scores + noise, the first of equals; `NAN` where a score is NaN. scores: [vocab]
    float32.

    With noise -log(-log u) and w = exp(score - best score), the largest score + noise is the largest w / -log u. As 1 -
    u <= -log u <= (1 - u) / u, that lies between w / (1 - u) - w and w / (1 - u), and a token whose upper bound is
    below another's lower bound cannot win. The first lower bound is that of the best score: far below it a token needs
    a 1 - u so small that few have it. The tokens that the bounds leave, mostly one or two, are compared exactly. Within
    `_REACH` the float32 error of w is less than one part in 10^5, which `_CERTAIN` covers. The exponential covers the
    rounding when noise is added to a huge score (ties are then frequent).
    """
    best = _first_best(scores)
    peak = scores[best]
    if not math.isfinite(peak):
        return NAN if math.isnan(peak) else best
    certain = np.float32(_CERTAIN * math.exp(-abs(peak) * UNIT * 2))
    least = np.float32(math.exp(-_REACH))
    floor = max(certain / _missing_to_one(key, best) - np.float32(1), least)
    tokens, weight, rest = _plausible(key, scores, peak, np.float32(math.exp(-_NEAR) / _CERTAIN) / floor)
    threshold = max((weight / rest * certain - weight).max(), least)
    winner, most = best, -np.inf
    for i in range(len(tokens)):
        if weight[i] / rest[i] >= threshold:
            value = scores[tokens[i]] + noise_of(key, tokens[i])
            if value > most:
                winner, most = tokens[i], value
    return winner


@cached_njit
def draw_bfloat16(key: Any, logits: Any, row: int, temperature: float) -> Any:
    """Call `draw` with the scores logits / temperature, float32. logits: [rows, vocab] int16, bfloat16 numbers."""
    bits, by = logits[row], np.float32(temperature)
    wide = np.empty(len(bits), np.int32)
    for i in range(len(bits)):
        wide[i] = np.int32(bits[i]) << np.int32(16)
    scores = wide.view(np.float32)
    for i in range(len(scores)):
        scores[i] /= by
    return draw(key, scores)


@cached_njit
def _plausible(key: Any, scores: Any, peak: Any, rare: Any) -> Any:
    """Return the tokens whose 1 - u is less than `rare`, or whose score is near the peak: their ids, ascending, w and 1
    - u.

    Most parts have none, which is determined without branches, many tokens at a time. No array is written in full.
    """
    count, near = len(scores), peak - np.float32(_NEAR)
    tokens, weight, rest = np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float32)
    found = 0
    for start in range(0, count, _PART):
        part, hits = scores[start : start + _PART], 0
        for i in range(len(part)):
            hits += np.int64(_missing_to_one(key, start + i) < rare) | np.int64(part[i] >= near)
        if hits:
            for i in range(len(part)):
                left = _missing_to_one(key, start + i)
                if left < rare or part[i] >= near:
                    tokens[found], weight[found], rest[found] = start + i, math.exp(part[i] - peak), left
                    found += 1
    return tokens[:found], weight[:found], rest[:found]


@cached_njit
def _first_best(scores: Any) -> Any:
    """Return the first token with the largest score, or with a NaN. The largest of each part is found without branches,
    many numbers at once; then only the best part is searched.
    """
    bits = scores.view(np.int32)
    best, first = np.int32(-0x80000000), 0
    for start in range(0, len(bits), _SEARCHED):
        part, largest = bits[start : start + _SEARCHED], np.int32(-0x80000000)
        for i in range(len(part)):
            largest = max(largest, _ordered(part[i]))
        if largest > best:
            best, first = largest, start
    for i in range(first, len(bits)):
        if _ordered(bits[i]) == best:
            return i
    return 0


@cached_njit
def _ordered(bits: Any) -> Any:
    """Return an integer that orders like the float32 number with these bits; every NaN comes after infinity."""
    ordered = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))  # below zero a larger magnitude is less
    return np.int32(ordered - np.int32(0x7FFFFF))  # shifted so far that NaN below minus infinity wraps to the top


@subroutine
def _missing_to_one(key: Any, token: Any) -> Any:
    """Return 1 - u of a token, float32, where u is the uniform number that its bits make."""
    left = np.int64(bits_of(key, token) ^ np.uint64((1 << 52) - 1))
    return (np.float32(left) + np.float32(0.5)) * np.float32(UNIT)


@cached_njit
def noises_of(key: np.uint64, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `noise_of` for [n] int64 tokens."""
    noises = np.empty(len(tokens), np.float64)
    for i in range(len(tokens)):
        noises[i] = noise_of(key, tokens[i])
    return noises
