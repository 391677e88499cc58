"""Counter-based Gumbel noise: the randomness of sampling as a pure function of (seed, position, token id).

Verifier and drafters, in any process and on any device, see the same noise, so the text does not depend on what was
drafted, and a drafter can rank its candidates by what the target will draw. The bits come from the splitmix64
finaliser on wrapping int64 (the same on CPU and GPU); the logarithms of the few that matter are taken on the CPU.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_UNIT = 2.0**-52
_EXACT = 64  # candidates compared exactly before the rest of the vocabulary is ruled out by their bits alone


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of `tokens` ([n] int64) as candidates for absolute `position`: [n] float64, on the CPU."""
    return -torch.log(-torch.log(_uniform(seed, position, tokens).cpu()))


def gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """argmax over tokens of scores + noise: one draw from softmax(scores), exactly.

    scores: [vocab] float32, logits / T; -inf marks a token that may not be drawn. A token outside the `_EXACT` best
    scores can win only if its noise makes up its distance to the leader, so only such tokens' noise is computed.
    """
    exact = min(_EXACT, len(scores))
    best = scores.topk(exact)
    tokens, values = best.indices, best.values.double().cpu()
    perturbed = values + gumbel(seed, position, tokens)
    leader = int(perturbed.argmax())
    gap = float(perturbed[leader] - values[-1])
    if exact == len(scores) or values[-1] == -math.inf:
        return int(tokens[leader])
    # noise > gap  <=>  uniform > exp(-exp(-gap)); one part in 2^40 is given away to rounding
    threshold = int(math.exp(-math.exp(-gap)) * (1 - 2.0**-40) / _UNIT)
    bits = _bits(seed, position, torch.arange(len(scores), device=scores.device))
    rivals = torch.nonzero(bits >= threshold).flatten()
    if not len(rivals):
        return int(tokens[leader])
    rivals = torch.cat([tokens[leader : leader + 1], rivals])
    return int(rivals[(scores[rivals].double().cpu() + gumbel(seed, position, rivals)).argmax()])


def _uniform(seed: int, position: int, tokens: Tensor) -> Tensor:
    """[n] float64, odd multiples of 2^-53 below 1: no rounding on any device."""
    return _bits(seed, position, tokens).double().add_(0.5).mul_(_UNIT)


def _bits(seed: int, position: int, tokens: Tensor) -> Tensor:
    """52 uniform bits per token, [n] int64."""
    key = _key(seed, position)
    if tokens.device.type == "cpu":
        return torch.from_numpy(_bits_in_numpy(key, tokens.numpy()))
    return _bits_in_torch(key, tokens)


def _bits_in_torch(key: int, tokens: Tensor) -> Tensor:
    x = tokens * _signed(_GOLDEN) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    return _shift(x ^ _shift(x, 31), 12)


def _bits_in_numpy(key: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same on a CPU, a third of torch's time: unsigned, and in place (fresh memory costs more than arithmetic)."""
    x = tokens.astype(np.uint64)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(key)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(_MIX_1)
    x ^= np.right_shift(x, 27, out=shifted)
    x *= np.uint64(_MIX_2)
    x ^= np.right_shift(x, 31, out=shifted)
    x >>= np.uint64(12)
    return x.view(np.int64)


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
