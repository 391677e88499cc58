"""The result of a block head's forward, and what it predicts after any token.

A row predicts by itself, and by its link with the token before it, whichever that is: a node of the tree, a retrieved
token. Where the head says how much of the target's probability its own covers (confidence c), the chance of a token is
c * q: the common mass, distributed as q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit
from torch import Tensor

from drafters.markov_link import Floats, Integers
from drafters.outcomes import Following
from drafters.ranking import Ranking
from drafters.top import enter

if TYPE_CHECKING:
    from drafters.block import BlockHead

_CANDIDATES = 48  # per row, by the row alone


class Asked(NamedTuple):
    """One prediction to compute. before: the token before the row. is_linked: the row's logits contain its link."""

    row: int
    before: int
    is_linked: bool


@dataclass(frozen=True)
class Rows:
    """The likeliest tokens of every row, by the row alone.

    scores: [rows, candidates] below the best one's; rest: [rows], the sum of exp(score) of all other tokens; ids:
    [rows, candidates] of the draft vocabulary; tokens: the target's ids; gates, sure: the states' parts in the link's
    gate, [rows, rank], and in the confidence, [rows]; gain: of a link.
    """

    scores: Floats
    rest: Floats
    ids: Integers
    tokens: Integers
    gates: Floats | None
    sure: Floats | None
    gain: float

    @classmethod
    def of(cls, head: BlockHead, ranking: Ranking, forward: BlockForward) -> Rows:
        states, logits = forward.states, forward.logits
        best = ranking.top(logits, forward.positions, min(_CANDIDATES, logits.shape[1]))
        scores = (best.values - best.values[:, :1]).cpu().numpy()
        rest = np.maximum(0, best.totals.cpu().numpy() - np.exp(scores).sum(-1))
        gates = None if head.link is None else head.link.gates(states)
        sure = None if head.confidence is None else head.confidence.of_states(states)
        tokens = head.target_ids[best.indices].cpu().numpy()
        return cls(scores, rest, best.indices.cpu().numpy(), tokens, gates, sure, ranking.gain)


@dataclass(eq=False)
class BlockForward:
    """The result of one forward for one session: the rows after each block's known prefix, concatenated.

    states: [rows, hidden]; logits: [rows, draft_vocab], with the link in the first row of each block; positions:
    [rows], of the tokens that they predict. rows: what they predict by themselves, found on first use.
    """

    states: Tensor
    logits: Tensor
    positions: list[int]
    rows: Rows | None = None

    def following(self, head: BlockHead, ranking: Ranking, asked: Sequence[Asked]) -> list[Following]:
        """What the head predicts in each case."""
        if self.rows is None:
            self.rows = Rows.of(head, ranking, self)
        found, rows = self.rows, np.array([one.row for one in asked])
        before = np.array([one.before for one in asked])
        scores, sure = found.scores[rows], np.ones(len(asked), np.float32)
        new = np.flatnonzero([not one.is_linked for one in asked])
        if head.link is not None and found.gates is not None:
            linked, at = scores[new], rows[new]
            head.link.add(linked, found.ids[at], found.gates[at], before[new], found.gain)
            scores[new] = linked
        if head.confidence is not None and found.sure is not None:
            sure = head.confidence.chance(found.sure[rows], before)
        k = min(ranking.top_k, scores.shape[1])
        places, chances = np.zeros((len(asked), k), np.int64), np.empty((len(asked), k), np.float32)
        likeliest(scores, found.rest[rows], sure, places, chances)
        tokens = np.take_along_axis(found.tokens[rows], places, 1)
        return list(zip(tokens.tolist(), chances.tolist(), strict=True))


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
