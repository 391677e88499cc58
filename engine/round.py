"""One request's part of a round: the tree that its drafter and its grammar propose, cut to the nodes that pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.cost_model import CostModel
from engine.messages import Array
from engine.request import Request
from engine.tree import GRAFT_CHANCE, TokenTree


@dataclass(frozen=True)
class Proposal:
    """What a drafter has sent for the round. number: of the draft, 0 for the root alone. draft_us: of its model."""

    number: int
    tree: TokenTree
    draft_us: int = 0


@dataclass(frozen=True)
class Round:
    """proposal: the tree as sent. drafted: the same with `grafts`, tokens that the grammar implies. worth: [nodes
    drafted] float32, expected tokens of each. kept: the nodes that are verified.
    """

    request: Request
    proposal: Proposal
    grafts: list[int]
    drafted: TokenTree
    worth: NDArray[np.float32]
    kept: Array

    @classmethod
    def of(cls, request: Request, proposal: Proposal) -> Round:
        """The proposal plus what the request's grammar grafts, minus what the grammar or the request rules out."""
        grafts = request.grafts(proposal.tree)
        tree = proposal.tree.grafted(grafts, GRAFT_CHANCE)
        return cls(request, proposal, grafts, tree, request.trust.worth(tree), request.admitted(tree))

    @cached_property
    def tree(self) -> TokenTree:
        """The tree that is verified."""
        return self.drafted if len(self.kept) == len(self.drafted) else self.drafted.keep(self.kept)

    @property
    def is_speculative(self) -> bool:
        """Whether anything is verified but the root."""
        return len(self.kept) > 1

    def root_only(self) -> Round:
        """The same round, with only the root verified."""
        return replace(self, kept=self.kept[:1])


def cut(rounds: Sequence[Round], costs: CostModel) -> list[Round]:
    """The rounds cut to the nodes that pay, chosen over all trees together. A kept node's ancestors are kept too, since
    worth never grows along a path.
    """
    if not any(round_.is_speculative for round_ in rounds):
        return [*rounds]
    owner = np.repeat(np.arange(len(rounds)), [len(round_.kept) for round_ in rounds])
    node = np.concatenate([np.arange(len(round_.kept)) for round_ in rounds])
    worth = np.concatenate([round_.worth[round_.kept] for round_ in rounds])
    order = np.argsort(np.where(node == 0, -np.inf, -worth), kind="stable")
    keys_each = sum(round_.request.cache.length for round_ in rounds) / len(rounds)
    best = order[: costs.nodes_worth(worth[order], len(rounds), keys_each)]
    return [replace(r, kept=r.kept[np.sort(node[best[owner[best] == i]])]) for i, r in enumerate(rounds)]
