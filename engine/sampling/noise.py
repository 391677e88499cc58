"""Counter-based Gumbel noise: the randomness of sampling as a pure function of (seed, position, token id).

Verifier and drafters, in any process and on any device, see the same noise, so the text does not depend on what was
drafted, and a drafter can rank its candidates by what the target will draw. The bits (`noise_bits`) are the same on CPU
and GPU; the logarithms of the few that matter are taken on the CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.sampling.argmax import NAN
from engine.sampling.gumbel_max import draw, noises_of
from engine.sampling.noise_bits import GOLDEN, MIX_1, MIX_2, UNIT, key_of


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Return the standard Gumbel noise of `tokens` ([n] int64) as candidates for absolute `position`: [n] float64, on
    the CPU.
    """
    return torch.from_numpy(noises_of(key_of(seed, position), tokens.cpu().numpy()))


def gumbel_nearby(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Return `gumbel` but for its last bits, computed and returned where the tokens are: enough for a
    drafter's guess.
    """
    return gumbel(seed, position, tokens) if tokens.device.type == "cpu" else _nearly(seed, position, tokens)


def divided(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature. On a GPU torch multiplies by the reciprocal of a number; this gives the CPU's
    quotients, as the kernel does that draws for many rows.
    """
    return logits / (temperature if logits.device.type == "cpu" else logits.new_full((), temperature))


def gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """Return the argmax over tokens of scores + noise, the first of equals: one draw from softmax(scores), exactly.

    scores: [vocab] float32, logits / T; -inf marks a token that may not be drawn. `NAN` if one is NaN.
    """
    if scores.device.type == "cpu":
        return int(draw(key_of(seed, position), scores.numpy()))
    rivals = _rivals_on_device(scores, seed, position)
    rival_scores = scores[rivals].double().cpu()
    if rival_scores.isnan().any():
        return NAN
    return int(rivals[(rival_scores + gumbel(seed, position, rivals)).argmax()])


def _rivals_on_device(scores: Tensor, seed: int, position: int) -> Tensor:
    """Return the tokens that may win, ascending. Logarithms are cheap on an accelerator, but may differ from the CPU's
    in their last bits.
    """
    tokens = torch.arange(len(scores), device=scores.device)
    estimate = scores.double() + _nearly(seed, position, tokens)
    best = estimate.max()
    return torch.nonzero(~(estimate < best - (1e-9 + best.abs() * UNIT * 4))).flatten()


def _nearly(seed: int, position: int, tokens: Tensor) -> Tensor:
    return -torch.log(-torch.log(_uniform(seed, position, tokens)))


def _uniform(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Return [n] float64, odd multiples of 2^-53 below 1: no rounding on any device."""
    return _bits(int(key_of(seed, position)), tokens).double().add_(0.5).mul_(UNIT)


def _bits(key: int, tokens: Tensor) -> Tensor:
    """Return 52 uniform bits per token, [n] int64, as `noise_bits` defines them."""
    x = tokens * _signed(GOLDEN) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return _shift(x ^ _shift(x, 31), 12)


def _shift(x: Tensor, n: int) -> Tensor:
    """Shift int64 logically to the right."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _signed(x: int) -> int:
    """Return the int64 of the same 64 bits."""
    return int(np.uint64(x).view(np.int64))
