"""Counter-based Gumbel noise: the randomness of sampling as a pure function of (seed, position, token id).

Verifier and drafters, in any process and on any device, see the same noise, so the text does not depend on what was
drafted, and a drafter can rank its candidates by what the target will draw. The bits come from the splitmix64
finaliser on wrapping int64 (the same on CPU and GPU); the logarithms of the few that matter are taken on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_UNIT = 2.0**-52
_CERTAIN = 1 - 1e-4  # far more than float32 can err in `_rivals`, whose proof needs three times that error
_REACH = 41.0  # noise lies in [-3.61, 36.74], so a token 40.36 below the best score never wins
_NEAR = 10.0  # below the best score: of the tokens further down only those with rare noise are looked at


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of `tokens` ([n] int64) as candidates for absolute `position`: [n] float64, on the CPU."""
    return -torch.log(-torch.log(_uniform(seed, position, tokens).cpu()))


def gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """argmax over tokens of scores + noise, the first of equals: one draw from softmax(scores), exactly.

    scores: [vocab] float32, logits / T; -inf marks a token that may not be drawn. Most tokens are ruled out by cheaper
    means than two exact logarithms; what is left, mostly one or two, is compared on the CPU.
    """
    if scores.device.type == "cpu":
        rivals = torch.from_numpy(_rivals(scores.numpy(), seed, position))
    else:
        rivals = _rivals_on_device(scores, seed, position)
    if len(rivals) == 1:
        return int(rivals)
    return int(rivals[(scores[rivals].double().cpu() + gumbel(seed, position, rivals)).argmax()])


def _rivals(scores: NDArray[np.float32], seed: int, position: int) -> NDArray[np.int64]:
    """The tokens that may win, ascending; never without the winner, nor without its equals.

    With noise -log(-log u) and w = exp(score - best score), the largest score + noise is the largest w / -log u. As
    1 - u <= -log u <= (1 - u) / u, that lies between w / (1 - u) - w and w / (1 - u), and a token whose upper bound is
    below another's lower bound cannot win. The first lower bound is that of the best score: far below it a token needs
    a 1 - u so small that few have it, and the exponentials of the others need not be taken. Within `_REACH` float32
    makes w wrong by less than one part in 10^5, for which `_CERTAIN` makes up; for what adding noise to a huge score
    rounds off (equals then abound), the exponential. Comparisons with NaN are false, so rows of infinities and NaN are
    compared exactly.
    """
    with np.errstate(all="ignore"):
        best = scores.argmax()
        peak, rest = scores[best], _rest(np.uint64(_key(seed, position)), len(scores))
        certain = np.float32(_CERTAIN * math.exp(-abs(float(peak)) * _UNIT * 2))
        least = np.float32(math.exp(-_REACH))
        floor = np.maximum(certain / rest[best] - 1, least)
        rare = rest < np.float32(math.exp(-_NEAR) / _CERTAIN) / floor
        tokens = np.flatnonzero(rare | ~(scores < peak - np.float32(_NEAR)))
        weight = np.exp(scores[tokens] - peak)
        upper = weight / rest[tokens]
        threshold = np.maximum((upper * certain - weight).max(), least)
        rivals: NDArray[np.int64] = tokens[~(upper < threshold)]
    return rivals


@njit(cache=True, nogil=True)
def _rest(key: np.uint64, count: int) -> NDArray[np.float32]:
    """1 - u of the tokens from 0 on, [count] float32, in one pass: of `_bits`, what is missing to 1."""
    rest = np.empty(count, np.float32)
    for token in range(count):
        left = np.int64(_bits_of(key, token) ^ np.uint64((1 << 52) - 1))
        rest[token] = (np.float32(left) + np.float32(0.5)) * np.float32(_UNIT)
    return rest


def _rivals_on_device(scores: Tensor, seed: int, position: int) -> Tensor:
    """The same for an accelerator, where logarithms are cheap but may differ from the CPU's in their last bits."""
    tokens = torch.arange(len(scores), device=scores.device)
    estimate = scores.double() - torch.log(-torch.log(_uniform(seed, position, tokens)))
    best = estimate.max()
    return torch.nonzero(~(estimate < best - (1e-9 + best.abs() * _UNIT * 4))).flatten()


def _uniform(seed: int, position: int, tokens: Tensor) -> Tensor:
    """[n] float64, odd multiples of 2^-53 below 1: no rounding on any device."""
    return _bits(seed, position, tokens).double().add_(0.5).mul_(_UNIT)


def _bits(seed: int, position: int, tokens: Tensor) -> Tensor:
    """52 uniform bits per token, [n] int64."""
    key = _key(seed, position)
    if tokens.device.type == "cpu":
        return torch.from_numpy(_bits_on_cpu(np.uint64(key), tokens.numpy()))
    return _bits_in_torch(key, tokens)


def _bits_in_torch(key: int, tokens: Tensor) -> Tensor:
    x = tokens * _signed(_GOLDEN) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return _shift(x ^ _shift(x, 31), 12)


@njit(cache=True, nogil=True)
def _bits_on_cpu(key: np.uint64, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    bits = np.empty(len(tokens), np.int64)
    for i in range(len(tokens)):
        bits[i] = np.int64(_bits_of(key, tokens[i]))
    return bits


@njit
def _bits_of(key: Any, token: Any) -> Any:
    x = np.uint64(token) * np.uint64(_GOLDEN) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(12)


def _key(seed: int, position: int) -> int:
    return _mix(_mix(seed * _GOLDEN) ^ (position + 1) * _MIX_1) + _GOLDEN & _MASK


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * _MIX_1 & _MASK
    x = (x ^ (x >> 27)) * _MIX_2 & _MASK
    return x ^ (x >> 31)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x
