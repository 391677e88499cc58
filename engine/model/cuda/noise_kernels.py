"""The noise of `engine.sampling.noise` on a GPU: draws and noisy scores of many rows at once.

A GPU's logarithms may differ from the CPU's in their last bits, and a text must not depend on them. So a draw is
settled on the GPU only where one token's score plus noise is clearly the largest. Where another token comes near it,
which is rare, the host draws that row with the CPU's logarithms (`UNSETTLED`).
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.device import uploaded
from engine.sampling.argmax import NAN
from engine.sampling.noise_bits import GOLDEN, MIX_1, MIX_2, UNIT, key_of
from engine.sampling.sampler import UNSETTLED

_PART = 2048  # tokens of a program
_NEAR = 2e-9  # what estimates may be off by, twice as much as in `engine.sampling.noise`
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_UNIT, _TOLERANCE = tl.constexpr(UNIT), tl.constexpr(_NEAR)
_NAN, _UNSETTLED = tl.constexpr(NAN), tl.constexpr(UNSETTLED)


@triton.jit
def _noise(key, token):
    """Return standard Gumbel noise, float64. key: int64, `key_of` of a seed and a position."""
    x = token.to(tl.uint64) * _GOLDEN + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = (x ^ (x >> 31)) >> 12
    return -tl.log(-tl.log((x.to(tl.float64) + 0.5) * _UNIT))


@triton.jit
def _reach(best):
    """Return how far below the best a score plus noise may be and still win on a CPU."""
    return _TOLERANCE + tl.abs(best) * _UNIT * 8


@triton.jit(do_not_specialize=["vocab", "draws"])
def draw_parts(
    logits,  # [rows, vocab]
    rows,  # [draws] int32
    keys,  # [draws] int64
    temperatures,  # [draws] float32, 0: greedy
    found,  # out: [3, draws, parts] float64: best score + noise, its token, how many are near it (-1: NaN)
    draws,
    vocab,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Draw from each part of the vocabulary: the token whose score plus noise is largest, the first of equals."""
    draw, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    at = tl.load(rows + draw).to(tl.int64) * vocab + token
    logit = tl.load(logits + at, mask=token < vocab, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + draw)
    value = tl.div_rn(logit, tl.where(temperature > 0, temperature, 1.0)).to(tl.float64)
    if temperature > 0:
        value += _noise(tl.load(keys + draw), token)
    no_number = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value != value, float("-inf"), value), 0)
    near = tl.sum((value >= best - _reach(best)).to(tl.int32), 0)
    place = draw * PARTS + part
    tl.store(found + place, best)
    tl.store(found + draws * PARTS + place, tl.min(tl.where(value == best, token, vocab), 0).to(tl.float64))
    tl.store(found + 2 * draws * PARTS + place, tl.where(no_number > 0, -1, near).to(tl.float64))


@triton.jit(do_not_specialize=["draws"])
def join_parts(
    found,  # see `draw_parts`
    temperatures,
    tokens,  # out: [draws] int32, `NAN` where a logit is NaN, `UNSETTLED` where the host has to draw
    draws,
    PARTS: tl.constexpr,
    PARTS_FILLED: tl.constexpr,
):
    """Draw from the parts' winners."""
    draw = tl.program_id(0)
    part = tl.arange(0, PARTS_FILLED)
    place, there = draw * PARTS + part, part < PARTS
    value = tl.load(found + place, mask=there, other=float("-inf"))
    near = tl.load(found + 2 * draws * PARTS + place, mask=there, other=0.0)
    best = tl.max(value, 0)
    rival = there & (value >= best - _reach(best))
    winner = tl.min(tl.where(there & (value == best), part, PARTS), 0)
    token = tl.load(found + draws * PARTS + draw * PARTS + winner).to(tl.int32)
    alone = (tl.sum(rival.to(tl.int32), 0) == 1) & (tl.sum(tl.where(rival, near, 0.0), 0) == 1)
    token = tl.where(alone | (tl.load(temperatures + draw) == 0), token, _UNSETTLED)
    tl.store(tokens + draw, tl.where(tl.min(tl.where(there, near, 0.0), 0) < 0, _NAN, token))


@triton.jit(do_not_specialize=["vocab"])
def score_noisily(
    scores,  # [rows, vocab] float32, changed
    ids,  # [vocab] int64, the tokens whose noise is added
    keys,  # [rows] int64
    gains,  # [rows] float32
    vocab,
    PART: tl.constexpr,
):
    """Compute scores = (scores + noise) * gain, in rows whose gain is not 0."""
    row = tl.program_id(0).to(tl.int64)
    gain = tl.load(gains + row)
    if gain == 0:
        return
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    there = column < vocab
    noise = _noise(tl.load(keys + row), tl.load(ids + column, mask=there, other=0)).to(tl.float32)
    place = scores + row * vocab + column
    tl.store(place, (tl.load(place, mask=there, other=0.0) + noise) * gain, mask=there)


@triton.jit(do_not_specialize=["columns"])
def rank(
    scores,  # [rows, columns]
    values,  # [rows, COUNT] the best of each row, largest first
    indices,  # [rows, COUNT] int64, their columns
    ids,  # [columns] int64
    tokens,  # out: [rows, COUNT] int64, the ids of these columns
    prob,  # out: [rows, COUNT] float32, their softmax
    columns,
    COUNT: tl.constexpr,
    COUNT_FILLED: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(values + row * COUNT).to(tl.float32)
    total = tl.zeros([PART], tl.float32)
    for at in range(0, columns, PART):
        column = at + tl.arange(0, PART)
        score = tl.load(scores + row * columns + column, mask=column < columns, other=float("-inf"))
        total += tl.exp(score.to(tl.float32) - best)
    number = tl.arange(0, COUNT_FILLED)
    there = number < COUNT
    place = row * COUNT + number
    chance = tl.exp(tl.load(values + place, mask=there, other=0.0).to(tl.float32) - best) / tl.sum(total, 0)
    tl.store(prob + place, tl.where(chance > 1.0, 1.0, chance), mask=there)
    tl.store(tokens + place, tl.load(ids + tl.load(indices + place, mask=there, other=0)), mask=there)


def draw_tokens(logits: Tensor, rows: Tensor, keys: Tensor, temperatures: Tensor, tokens: Tensor) -> None:
    """Draw a token from softmax(logits / temperature) for each of some rows, as `gumbel_argmax` does; where temperature
    is 0, take the argmax. tokens: [draws] int32, written. logits: [rows, vocab]; the others: see `draw_parts`.
    """
    draws, vocab = len(rows), logits.shape[1]
    parts = triton.cdiv(vocab, _PART)
    found = torch.empty(3, draws, parts, dtype=torch.float64, device=logits.device)
    draw_parts[(draws, parts)](
        logits, rows, keys, temperatures, found, draws, vocab, PARTS=parts, PART=_PART, **_LAUNCH
    )
    filled = triton.next_power_of_2(parts)
    join_parts[(draws,)](found, temperatures, tokens, draws, PARTS=parts, PARTS_FILLED=filled, num_warps=1)


def likeliest(scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids of the best columns of each row of scores, [rows, count], and their softmax. ids: [columns]."""
    best = scores.topk(count)
    tokens, prob = torch.empty_like(best.indices), best.values.new_empty(best.values.shape, dtype=torch.float32)
    rank[(len(scores),)](
        scores.contiguous(), best.values, best.indices, ids, tokens, prob, scores.shape[1], COUNT=count,
        COUNT_FILLED=triton.next_power_of_2(count), PART=_PART, **_LAUNCH,
    )  # fmt: skip
    return tokens, prob


def noisy_scores(scores: Tensor, ids: Tensor, keys: Tensor, gains: Sequence[float]) -> Tensor:
    """Compute (scores + noise) * gain, written over the scores, [rows, vocab] float32. ids: [vocab], the tokens of the
    columns. keys: [rows], see `noise_keys`. A row of gain 0 is left as it is.
    """
    scores, vocab = scores.contiguous(), scores.shape[1]
    given = [keys, torch.tensor(gains, dtype=torch.float32)]
    score_noisily[(len(scores), triton.cdiv(vocab, _PART))](
        scores, ids, *uploaded(given, scores.device), vocab, PART=_PART, **_LAUNCH
    )
    return scores


def noise_keys(places: Sequence[tuple[int, int]]) -> Tensor:
    """Return [places] int64: the keys of (seed, position); rows of a tree share few."""
    known = {place: key_of(*place) for place in dict.fromkeys(places)}
    return torch.from_numpy(np.array([known[place] for place in places], np.uint64).view(np.int64))
