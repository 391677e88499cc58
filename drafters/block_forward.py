"""The result of a block head's forward, and what it predicts after any token.

A row predicts by itself, and by its link with the token before it, whichever that is: the text's last token, a node of
the tree, a retrieved token. Where the head says how much of the target's probability its own covers (confidence c), the
chance of a token is c * q: the common mass, distributed as q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from drafters.markov_link import Floats, Integers
from drafters.outcomes import Following
from drafters.ranking import Ranking
from drafters.top import enter

if TYPE_CHECKING:
    from drafters.block import BlockHead

_CANDIDATES = 128  # per row, by the row alone; a link often lifts one that is far down


class Asked(NamedTuple):
    """One prediction to compute. before: the token before the row."""

    row: int
    before: int


class Outputs(NamedTuple):
    """What comes of rows' states in one product. logits: [rows, draft_vocab], without links; gates: [rows, rank], the
    states' part in the link's gate, zero without one; sure: [rows], their part in the confidence, if the head has one.
    """

    logits: Tensor
    gates: Tensor
    sure: Tensor


@dataclass(frozen=True)
class Rows:
    """The likeliest tokens of every row, by the row alone: where a request samples with top-k, top-p or min-p, these
    rule tokens out before links are added.

    scores: [rows, candidates] below the best one's; rest: [rows], the sum of exp(score) of all other tokens; ids:
    [rows, candidates] of the draft vocabulary; tokens: the target's ids; gates, [rows, rank], and sure, [rows]: the
    states' parts in the link's gate and in the confidence; gain: of a link.
    """

    scores: Floats
    rest: Floats
    ids: Integers
    tokens: Integers
    gates: Floats
    sure: Floats
    gain: float

    @classmethod
    def of(cls, ranking: Ranking, outputs: Outputs, positions: list[int]) -> Rows:
        best = ranking.top(outputs.logits, positions, min(_CANDIDATES, outputs.logits.shape[1]))
        scores = (best.values - best.values[:, :1]).cpu().numpy()
        rest = np.maximum(0, best.totals.cpu().numpy() - np.exp(scores).sum(-1))
        tokens = ranking.target_ids[best.indices].cpu().numpy()
        gates, sure = (part.float().cpu().contiguous().numpy() for part in (outputs.gates, outputs.sure))
        return cls(scores, rest, best.indices.cpu().numpy(), tokens, gates, sure, ranking.gain)


@dataclass(eq=False)
class BlockForward:
    """The result of one forward for one session: the rows after each block's known prefix, concatenated.

    outputs: of these rows; positions: [rows], of the tokens that they predict. rows: what they predict by themselves,
    found on first use.
    """

    outputs: Outputs
    positions: list[int]
    rows: Rows | None = None

    def following(self, head: BlockHead, ranking: Ranking, asked: Sequence[Asked]) -> list[Following]:
        """What the head predicts in each case."""
        found = self.rows = self.rows or Rows.of(ranking, self.outputs, self.positions)
        rows, before = np.array([one.row for one in asked]), np.array([one.before for one in asked])
        scores, sure = found.scores[rows], np.ones(len(asked), np.float32)
        if head.link is not None:
            head.link.add(scores, found.ids[rows], found.gates[rows], before, found.gain)
        if head.confidence is not None:
            sure = head.confidence.chance(found.sure[rows], before)
        k = min(ranking.top_k, scores.shape[1])
        places, chances = np.zeros((len(asked), k), np.int64), np.empty((len(asked), k), np.float32)
        likeliest(scores, found.rest[rows], sure, places, chances)
        tokens = np.take_along_axis(found.tokens[rows], places, 1)
        return list(zip(tokens.tolist(), chances.tolist(), strict=True))

    def linked(self, head: BlockHead, one: Asked) -> Tensor:
        """[1, draft_vocab] float32: the logits of a row that has been asked for, its candidates' with their links."""
        assert self.rows is not None
        row = slice(one.row, one.row + 1)
        logits, ids = self.outputs.logits[row].to("cpu", torch.float32, copy=True), self.rows.ids[row]
        if head.link is not None:
            linked = np.take_along_axis(logits.numpy(), ids, 1)
            head.link.add(linked, ids, self.rows.gates[row], np.array([one.before]), 1.0)
            np.put_along_axis(logits.numpy(), ids, linked, 1)
        return logits.to(head.device)


@njit(cache=True, nogil=True)
def likeliest(scores: Any, rest: Any, sure: Any, places: Any, chances: Any) -> None:
    """The best k of each row's scores, and their chances.

    scores: [n, candidates]; rest: [n], the sum of exp(score) of what is no candidate; sure: [n], by which the chances
    are multiplied. Written: places, [n, k] int64, best first, and chances, [n, k] float32.
    """
    k = places.shape[1]
    for row in range(len(scores)):
        best, count = np.empty(k, np.float32), 0
        for column in range(scores.shape[1]):
            count = enter(scores[row, column], column, best, places[row], count)
        peak, sums = best[0], 0.0
        if rest[row]:
            peak = max(peak, np.float32(0))  # exp(-peak) must not overflow
            sums = rest[row] * math.exp(-peak)
        for column in range(scores.shape[1]):
            sums += math.exp(scores[row, column] - peak)
        for column in range(k):
            chances[row, column] = sure[row] * math.exp(best[column] - peak) / sums
