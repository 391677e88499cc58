"""One request's part of a round: the tree that its drafter and its grammar propose, cut to the nodes that pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.core.tree import GRAFT_PROB, TokenTree
from engine.verifier.cost_model import CostModel
from engine.verifier.request import Request
from engine.wire.messages import Array


@dataclass(frozen=True)
class Proposal:
    """What a drafter has sent for the round. number: of the draft, 0 for the root alone. draft_us: of its model."""

    number: int
    tree: TokenTree
    draft_us: int = 0


@dataclass(frozen=True)
class StepInput:
    """proposal: the tree as sent. asked: whether a drafter was asked for it. uncut: the tree with `forced_tokens`,
    those that the grammar implies. kept: the nodes that are verified.
    """

    request: Request
    proposal: Proposal
    asked: bool
    forced_tokens: list[int]
    uncut: TokenTree
    kept: Array

    @classmethod
    def of(cls, request: Request, proposal: Proposal) -> StepInput:
        """The proposal plus what the request's grammar implies, minus what the grammar or the request rules out."""
        forced_tokens = request.forced_tokens(proposal.tree)
        tree = proposal.tree.grafted(forced_tokens, GRAFT_PROB)
        asked = request.wants_draft and not request.root_only
        return cls(request, proposal, asked, forced_tokens, tree, request.admitted(tree))

    @cached_property
    def tree(self) -> TokenTree:
        """The tree that is verified."""
        return self.uncut if len(self.kept) == len(self.uncut) else self.uncut.keep(self.kept)

    @property
    def is_speculative(self) -> bool:
        """Whether anything is verified but the root."""
        return len(self.kept) > 1

    def best(self, rows: int) -> StepInput:
        """The same round, with at most `rows` nodes verified: the root and the most confident, which include
        all of their ancestors.
        """
        if rows >= len(self.kept):
            return self
        order = np.argsort(-self.uncut.confidence[self.kept[1:]], kind="stable") + 1
        return replace(self, kept=self.kept[np.sort(np.append(0, order[: rows - 1]))])


def cut(steps: Sequence[StepInput], costs: CostModel) -> list[StepInput]:
    """The steps cut to the nodes that pay, chosen over all trees together."""
    if not any(step.is_speculative for step in steps):
        return [*steps]
    keys_each = sum(step.request.cache.length for step in steps) / len(steps)
    pay = paying([step.uncut.confidence[step.kept] for step in steps], costs, keys_each)
    return [replace(step, kept=step.kept[nodes]) for step, nodes in zip(steps, pay, strict=True)]


def paying(expected_tokens: Sequence[NDArray[np.float32]], costs: CostModel, keys_each: float = 0.0) -> list[Array]:
    """Per tree, the nodes that pay, ascending: the root, and nodes with all of their ancestors, since expected
    tokens never grow along a path. expected_tokens: of each tree, [nodes]; keys_each: average number of keys that a row
    sees.
    """
    owner = np.repeat(np.arange(len(expected_tokens)), [len(tree) for tree in expected_tokens])
    node = np.concatenate([np.arange(len(tree)) for tree in expected_tokens])
    all_expected = np.concatenate([*expected_tokens])
    order = np.argsort(np.where(node == 0, -np.inf, -all_expected), kind="stable")
    best = order[: costs.nodes_worth(all_expected[order], len(expected_tokens), keys_each)]
    return [np.sort(node[best[owner[best] == tree]]) for tree in range(len(expected_tokens))]
