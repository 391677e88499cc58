"""The result of a block head's forward: rows, and which tokens they predict after which.

Blocks become a table: for each depth, the likeliest tokens by the rows alone and, with the link, the likeliest tokens
after each of them. Growing a tree then means table look-ups. Where the head predicts how much of the target's
probability its own covers (confidence c), the chance of a token is c * q: the common mass, distributed as q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.outcomes import Following
from drafters.ranking import Ranking
from drafters.top import top

if TYPE_CHECKING:
    from drafters.block import BlockHead

_CANDIDATES = 48  # per row; links are computed from and to these


@dataclass(eq=False)
class BlockForward:
    """The result of one forward for one session: the rows after each block's known prefix, concatenated.

    states: [rows, hidden]; logits: [rows, draft_vocab], with the link in the first row of each block; first: [blocks]
    those rows; roots: the token before each. table: built on first use.
    """

    states: Tensor
    logits: Tensor
    first: list[int]
    roots: list[int]
    table: Table | None = None


class Table:
    """What may follow each candidate of a forward's rows.

    ids: [rows, candidates] of each row. alone: each row's prediction without a link, [rows, k] tokens and chances.
    linked: its prediction after each candidate of the row before, [rows, candidates, k]; None without a link.
    """

    def __init__(self, ids: Tensor, alone: tuple[Tensor, Tensor], linked: tuple[Tensor, Tensor] | None):
        self.ids, self.alone, self.linked = ids, alone, linked
        self._place: dict[int, dict[int, int]] = {}

    def following(self, row: int, token: int | None) -> Following:
        """The row's prediction after `token` if that is a candidate of the row before, else the one without a link."""
        place = self._places(row - 1).get(token) if token is not None and self.linked is not None else None
        if place is None or self.linked is None:
            return self.alone[0][row].tolist(), self.alone[1][row].tolist()
        return self.linked[0][row, place].tolist(), self.linked[1][row, place].tolist()

    def _places(self, row: int) -> dict[int, int]:
        if row not in self._place:
            self._place[row] = {token: place for place, token in enumerate(self.ids[row].tolist())}
        return self._place[row]


def table_of(head: BlockHead, ranking: Ranking, forward: BlockForward, positions: list[int]) -> Table:
    """positions: of the tokens that the rows predict."""
    states = forward.states
    best = ranking.top(forward.logits, positions, min(_CANDIDATES, forward.logits.shape[1]))
    ids, peak = head.target_ids[best.indices], best.values[:, :1]
    likely = (best.values - peak).exp()
    rest = (best.totals - likely.sum(-1)).clamp(min=0)
    before = ids.roll(1, 0)  # the candidates of the row before
    before[forward.first] = torch.tensor(forward.roots, device=ids.device)[:, None]
    said = head.chance_of_overlap(states, before)
    sure = torch.ones(ids.shape, device=ids.device) if said is None else said
    k = ranking.top_k
    alone = ids[:, :k], (likely / best.totals[:, None] * sure.mean(1, keepdim=True))[:, :k]
    if head.link is None:
        return Table(ids, alone, None)
    link = (head.link(states, before) @ head.link.second[best.indices].transpose(1, 2)).float() * ranking.gain
    linked = top((best.values[:, None] + link - peak[:, None]).flatten(0, 1), min(k, ids.shape[1]))
    values, places = (x.unflatten(0, ids.shape) for x in (linked.values, linked.indices))
    first, totals = values[..., :1], linked.totals.view(ids.shape)[..., None]
    chance = (values - first).exp() / (totals + rest[:, None, None] * (-first).exp()) * sure[..., None]
    return Table(ids, alone, (ids[:, None].expand(-1, ids.shape[1], -1).gather(2, places), chance))
