"""Draws and noisy scores of many rows at once on a GPU, each in one kernel: the noise of `engine.sampling.noise`.

A GPU's logarithms may differ from the CPU's in their last bits, and a text must not depend on them. So the kernel finds
in each part of the vocabulary the token whose score plus noise is largest, and how many come near it. On the host,
tokens of different parts that are near each other are compared with the CPU's logarithms; where a part has more than
one near the best, which is rare, the row is drawn by `gumbel_argmax`. All rows come to the host in one copy.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from engine.device import uploaded
from engine.sampling.argmax import NAN
from engine.sampling.noise import divided, gumbel, gumbel_argmax
from engine.sampling.noise_bits import GOLDEN, MIX_1, MIX_2, UNIT, key_of

_PART = 2048  # tokens of a program
_NEAR = 2e-9  # what estimates may be off by, twice as much as in `engine.sampling.noise`
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_UNIT, _TOLERANCE = tl.constexpr(UNIT), tl.constexpr(_NEAR)


class Draw(NamedTuple):
    """One draw from softmax(logits / temperature). row: of the logits; position: absolute, of the token drawn."""

    row: int
    temperature: float
    seed: int
    position: int


@triton.jit
def _noise(key, token):
    """Standard Gumbel noise, float64. key: int64, `key_of` of a seed and a position."""
    x = token.to(tl.uint64) * _GOLDEN + key.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = (x ^ (x >> 31)) >> 12
    return -tl.log(-tl.log((x.to(tl.float64) + 0.5) * _UNIT))


@triton.jit(do_not_specialize=["vocab"])
def draw_parts(
    logits,  # [rows, vocab]
    rows,  # [draws] int64
    keys,  # [draws] int64
    temperatures,  # [draws] float32
    found,  # out: [4, draws, parts] float64: best score + noise, its token, its score, how many are near (-1: NaN)
    draws,
    vocab,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    draw, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    at = tl.load(rows + draw) * vocab + token
    logit = tl.load(logits + at, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(logit, tl.load(temperatures + draw))
    value = score.to(tl.float64) + _noise(tl.load(keys + draw), token)
    no_number = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value != value, float("-inf"), value), 0)
    near = tl.sum((value >= best - (_TOLERANCE + tl.abs(best) * _UNIT * 8)).to(tl.int32), 0)
    winner = tl.min(tl.where(value == best, token, vocab), 0)
    place = draw * PARTS + part
    tl.store(found + place, best)
    tl.store(found + draws * PARTS + place, winner.to(tl.float64))
    tl.store(
        found + 2 * draws * PARTS + place,
        tl.max(tl.where(token == winner, score, float("-inf")), 0).to(tl.float64),
    )
    tl.store(found + 3 * draws * PARTS + place, tl.where(no_number > 0, -1, near).to(tl.float64))


@triton.jit(do_not_specialize=["vocab"])
def score_noisily(
    scores,  # [rows, vocab] float32, changed
    ids,  # [vocab] int64, the tokens whose noise is added
    keys,  # [rows] int64
    gains,  # [rows] float32
    vocab,
    PART: tl.constexpr,
):
    """scores = (scores + noise) * gain, in rows whose gain is not 0."""
    row = tl.program_id(0).to(tl.int64)
    gain = tl.load(gains + row)
    if gain == 0:
        return
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    there = column < vocab
    noise = _noise(tl.load(keys + row), tl.load(ids + column, mask=there, other=0)).to(tl.float32)
    place = scores + row * vocab + column
    tl.store(place, (tl.load(place, mask=there, other=0.0) + noise) * gain, mask=there)


def drawn(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each draw, as `gumbel_argmax` draws it; `NAN` where a logit is NaN. logits: [rows, vocab]."""
    logits, vocab = logits.contiguous(), logits.shape[1]
    parts = triton.cdiv(vocab, _PART)
    given = [
        torch.tensor([one.row for one in draws]),
        _keys([(one.seed, one.position) for one in draws]),
        torch.tensor([one.temperature for one in draws], dtype=torch.float32),
    ]
    found = torch.empty(4, len(draws), parts, dtype=torch.float64, device=logits.device)
    draw_parts[(len(draws), parts)](
        logits, *uploaded(given, logits.device), found, len(draws), vocab, PARTS=parts, PART=_PART, **_LAUNCH
    )
    return _joined(logits, draws, found.cpu().numpy())


def _joined(logits: Tensor, draws: Sequence[Draw], found: NDArray[np.float64]) -> list[int]:
    """The winners of the parts' winners. found: see `draw_parts`."""
    best, winner = found[0].max(-1, initial=-np.inf), found[0].argmax(-1)
    with np.errstate(invalid="ignore"):  # infinities
        rivals = found[0] >= (best - (_NEAR + np.abs(best) * UNIT * 8))[:, None]
    rows, near = np.arange(len(draws)), found[3]
    clear = (rivals.sum(-1) == 1) & (near[rows, winner] == 1) & (near >= 0).all(-1)
    tokens: list[int] = np.where(clear, found[1][rows, winner], NAN).astype(np.int64).tolist()
    for row in np.flatnonzero(~clear).tolist():
        tokens[row] = _closely_drawn(logits, draws[row], rivals[row], *found[1:, row])
    return tokens


def _closely_drawn(
    logits: Tensor,
    draw: Draw,
    rivals: NDArray[np.bool_],
    tokens: NDArray[np.float64],
    scores: NDArray[np.float64],
    near: NDArray[np.float64],
) -> int:
    """The winner of a row whose parts' winners are near each other, or are no numbers. rivals, ...: [parts]."""
    if (near < 0).any():
        return NAN
    if not rivals.any() or near[rivals].max() > 1 or near[rivals].min() == 0:  # several in a part, or infinities
        return gumbel_argmax(divided(logits[draw.row].float(), draw.temperature), draw.seed, draw.position)
    left = tokens[rivals].astype(np.int64)
    values = scores[rivals] + gumbel(draw.seed, draw.position, torch.from_numpy(left)).numpy()
    return int(left[values.argmax()])


def noisy_scores(scores: Tensor, ids: Tensor, rows: Sequence[tuple[int, int, float]]) -> Tensor:
    """(scores + noise) * gain, written over the scores, [rows, vocab] float32. ids: [vocab], the tokens of the columns.
    rows: each one's seed, position and gain; of gain 0 it is left as it is.
    """
    scores, vocab = scores.contiguous(), scores.shape[1]
    given = [_keys([row[:2] for row in rows]), torch.tensor([row[2] for row in rows], dtype=torch.float32)]
    score_noisily[(len(scores), triton.cdiv(vocab, _PART))](
        scores, ids, *uploaded(given, scores.device), vocab, PART=_PART, **_LAUNCH
    )
    return scores


def _keys(places: Sequence[tuple[int, int]]) -> Tensor:
    """[places] int64: the keys of (seed, position); rows of a tree share few."""
    known = {place: key_of(*place) for place in dict.fromkeys(places)}
    return torch.from_numpy(np.array([known[place] for place in places], np.uint64).view(np.int64))
