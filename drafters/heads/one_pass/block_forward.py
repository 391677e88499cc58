"""The result of a block head's forward, and what it predicts after any token.

A row predicts by itself, and by its link with the token before it, whichever that is: the text's last token, a node of
the tree, a retrieved token. Where the head says how much of the target's probability its own covers (confidence c), the
probability of a token is c * q: the common mass, distributed as q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafters.heads.growth.ranking import Ranking
from drafters.heads.one_pass.block_weights import BlockWeights, Outputs
from drafters.heads.one_pass.markov_link import NO_LINK, add_link
from drafters.heads.one_pass.spine import Spine
from drafters.heads.top import Floats, Integers, enter, top, write_top
from engine.core.outcomes import Following
from engine.device import downloaded, uploaded
from engine.kernels.jit_cache import cached_njit

_NO_CHANGE = np.empty((0, 0), np.float32)


class RowQuery(NamedTuple):
    """One prediction to compute. before: the token before the row."""

    row: int
    before: int


class BlockForward:
    """The result of one forward for one session: the rows after each block's known prefix, concatenated.

    outputs: of these rows; positions: [rows], of the tokens that they predict; candidates: of a row. A row's likeliest
    tokens by the row alone are found when it is first asked for: small trees ask only for the first rows. Where a
    request samples, top-k, top-p and min-p rule out tokens before links are added.
    """

    def __init__(self, outputs: Outputs, positions: list[int], candidates: int):
        self.outputs, self.positions = outputs, positions
        rows, candidates = len(positions), min(candidates, outputs.logits.shape[1])
        self._found: set[int] = set()
        self._gain = np.float32(1)  # the factor of a link
        self._scores, self._ids = np.empty((rows, candidates), np.float32), np.empty((rows, candidates), np.int64)
        self._totals = np.empty(rows, np.float32)  # sum of exp(score - best score) of all tokens
        self._gates, self._sure = (part.float().contiguous().numpy() for part in (outputs.gates, outputs.sure))

    def take(self, gain: float, scores: Tensor, ids: Tensor, totals: Tensor) -> None:
        """Take the likeliest tokens of all rows, which were found elsewhere. gain: the factor of a link there."""
        self._gain, self._found = np.float32(gain), set(range(len(ids)))
        self._scores[:], self._ids[:], self._totals[:] = scores.numpy(), ids.numpy(), totals.numpy()

    def following(self, head: BlockWeights, ranking: Ranking, asked: Sequence[RowQuery]) -> list[Following]:
        """Return what the head predicts in each case."""
        rows, before = np.array([one.row for one in asked]), np.array([one.before for one in asked])
        self._find(ranking, {one.row for one in asked})
        sure = np.ones(len(asked), np.float32)
        if head.confidence is not None:
            sure = head.confidence.prob(self._sure[rows], before)
        k = min(ranking.top_k, self._scores.shape[1])
        ids, probs = np.zeros((len(asked), k), np.int64), np.empty((len(asked), k), np.float32)
        tables = NO_LINK if head.link is None else head.link.tables
        gates, changes = self._gates, _NO_CHANGE
        if head.spine is not None:
            gates, changes = _NO_CHANGE, self._changes(head.spine, rows, before)
        likeliest(
            tables, rows, before, self._scores, self._totals, self._ids, gates, changes, sure, self._gain, ids, probs
        )
        return list(zip(head.tokens[ids].tolist(), probs.tolist(), strict=True))

    def linked(self, head: BlockWeights, one: RowQuery) -> Tensor:
        """Return [1, draft_vocab]: the logits of a row that was asked for before, its candidates' with their links."""
        assert one.row in self._found
        logits, ids = self.outputs.logits[one.row : one.row + 1], self._ids[one.row]
        if head.spine is not None:
            [more] = self._changes(head.spine, np.array([one.row]), np.array([one.before]))
        elif head.link is not None:
            head.link.add(more := np.zeros(len(ids), np.float32), ids, self._gates[one.row], one.before)
        else:
            return logits
        added = uploaded([torch.from_numpy(ids), torch.from_numpy(more)], logits.device)
        return logits[0].float().index_add(0, *added)[None]

    def _changes(self, spine: Spine, rows: Integers, before: Integers) -> Floats:
        """Return [n, candidates]: by how much DSpine scores the rows' candidates otherwise behind these tokens."""
        ids = self._ids[rows]
        logits = self.outputs.logits[torch.from_numpy(rows)[:, None], torch.from_numpy(ids)].to("cpu", torch.float32)
        return spine.change(self._gates[rows], logits, ids, before)

    def _find(self, ranking: Ranking, rows: set[int]) -> None:
        """Find the likeliest tokens of these rows."""
        if not (new := rows - self._found):
            return
        if self.outputs.logits.device.type != "cpu":
            return find_all([(self, ranking)])
        self._begin(ranking)
        for part in (slice(row, row + 1) for row in new):
            scores = ranking.scores(self.outputs.logits[part], self.positions[part])
            write_top(scores, self._scores[part], self._ids[part], self._totals[part])
        self._found |= rows

    def _begin(self, ranking: Ranking) -> None:
        if not self._found:
            self._gain = np.float32(ranking.gain)  # it changes with every verdict, those of other requests too


def find_all(asked: Sequence[tuple[BlockForward, Ranking]]) -> None:
    """Find the likeliest tokens of all rows of forwards on a GPU, for these rankings, and take them to the host
    together: each result that is read waits for the device.
    """
    if not (new := [(forward, ranking) for forward, ranking in asked if not forward._found]):
        return
    scores = Ranking.scores_of([(ranking, forward.outputs.logits, forward.positions) for forward, ranking in new])
    best = top(scores, new[0][0]._scores.shape[1])
    counts = [len(forward.positions) for forward, _ in new]
    found = zip(*(part.split(counts) for part in downloaded(best)), strict=True)
    for (forward, ranking), best_of_rows in zip(new, found, strict=True):
        forward.take(ranking.gain, *best_of_rows)


@cached_njit
def likeliest(
    tables: Any,
    rows: Any,
    before: Any,
    scores: Any,
    totals: Any,
    ids: Any,
    gates: Any,
    changes: Any,
    sure: Any,
    gain: Any,
    best_ids: Any,
    probs: Any,
) -> None:
    """For each of n nodes, write the k likeliest next tokens, best first, and their probabilities.

    `rows[i]` is the node's row in the forward; `before[i]` is the node's token. scores, ids: [rows, candidates], best
    first. totals: [rows], the sum of exp(score - best score) over all tokens. gates: [rows, rank]. changes: [n,
    candidates], added to the scores times `gain`; none where it is empty. sure: [n], factors of the probabilities.
    tables, gain: the link's. Written: best_ids, [n, k] int64, and probs, [n, k] float32.
    """
    candidates, k = scores.shape[1], probs.shape[1]
    places, best, linked = np.empty(k, np.int64), np.empty(k, np.float32), np.empty(gates.shape[1], np.float32)
    for node in range(len(rows)):
        row, count = rows[node], 0
        own, rest = scores[row] - scores[row, 0], totals[row]
        for column in range(candidates):
            rest -= math.exp(own[column])
        if tables.rank:
            add_link(tables, own, ids[row], gates.ctypes.data + 4 * row * tables.rank, before[node], gain, linked)
        for column in range(candidates if len(changes) else 0):
            own[column] += gain * changes[node, column]
        for column in range(candidates):
            count = enter(own[column], column, best, places, count)
        peak, sums = best[0], 0.0
        if rest > 0:  # the probability of what is no candidate
            peak = max(peak, np.float32(0))  # exp(-peak) must not overflow
            sums = rest * math.exp(-peak)
        for column in range(candidates):
            sums += math.exp(own[column] - peak)
        for column in range(k):
            best_ids[node, column] = ids[row, places[column]]
            probs[node, column] = sure[node] * math.exp(best[column] - peak) / sums
