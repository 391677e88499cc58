"""Counter-based Gumbel noise: the randomness of sampling as a pure function of (seed, position, token id).

Verifier and drafters, in any process and on any device, see the same noise, so the text does not depend on what was
drafted, and a drafter can rank its candidates by what the target will draw. The bits (`noise_bits`) are the same on CPU
and GPU; the logarithms of the few that matter are taken on the CPU.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.noise_bits import GOLDEN, MIX_1, MIX_2, UNIT, bits_of_all, key_of, missing_to_one

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
        peak, rest = scores[best], missing_to_one(key_of(seed, position), len(scores))
        certain = np.float32(_CERTAIN * math.exp(-abs(float(peak)) * UNIT * 2))
        least = np.float32(math.exp(-_REACH))
        floor = np.maximum(certain / rest[best] - 1, least)
        rare = rest < np.float32(math.exp(-_NEAR) / _CERTAIN) / floor
        tokens = np.flatnonzero(rare | ~(scores < peak - np.float32(_NEAR)))
        weight = np.exp(scores[tokens] - peak)
        upper = weight / rest[tokens]
        threshold = np.maximum((upper * certain - weight).max(), least)
        rivals: NDArray[np.int64] = tokens[~(upper < threshold)]
    return rivals


def _rivals_on_device(scores: Tensor, seed: int, position: int) -> Tensor:
    """The same for an accelerator, where logarithms are cheap but may differ from the CPU's in their last bits."""
    tokens = torch.arange(len(scores), device=scores.device)
    estimate = scores.double() - torch.log(-torch.log(_uniform(seed, position, tokens)))
    best = estimate.max()
    return torch.nonzero(~(estimate < best - (1e-9 + best.abs() * UNIT * 4))).flatten()


def _uniform(seed: int, position: int, tokens: Tensor) -> Tensor:
    """[n] float64, odd multiples of 2^-53 below 1: no rounding on any device."""
    return _bits(seed, position, tokens).double().add_(0.5).mul_(UNIT)


def _bits(seed: int, position: int, tokens: Tensor) -> Tensor:
    """52 uniform bits per token, [n] int64."""
    key = key_of(seed, position)
    if tokens.device.type == "cpu":
        return torch.from_numpy(bits_of_all(key, tokens.numpy()))
    return _bits_in_torch(int(key), tokens)


def _bits_in_torch(key: int, tokens: Tensor) -> Tensor:
    x = tokens * _signed(GOLDEN) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return _shift(x ^ _shift(x, 31), 12)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return int(np.uint64(x).view(np.int64))
