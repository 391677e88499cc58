"""Trees that grow in lockstep: each turn expands all their frontiers in one forward."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from drafters.heads.forwards import Forwards
from drafters.heads.growth.policies import Candidates, Frontier, Policy
from drafters.heads.growth.trie import Trie
from engine.core.drafter_protocol import BetweenSteps
from engine.core.outcomes import Following
from engine.core.tree import TokenTree


class Advice(Protocol):
    """Another source's part in the growth of one tree."""

    def worth_drafting(self, frontier: Frontier, drafted: Container[int] = ()) -> bool:
        """Return whether the head should expand those of these nodes that are not drafted; otherwise the other source
        continues there alone.
        """

    def candidates(self, node: int, parent: int, token: int, seen: Following | None) -> Following:
        """Return what may follow a node of the growing tree, given the head's prediction there (None: not drafted)."""


class Growth:
    """A tree that grows from the node `root` of a trie, below `token`. known: node of the tree -> node of the trie.
    reach: layers below the root that the head drafts.
    """

    def __init__(self, trie: Trie, root: int, token: int, policy: Policy, adviser: Advice | None):
        self.trie, self.policy, self.adviser = trie, policy, adviser
        self.known, self.reach = {0: root}, 0
        self.steps = policy.steps(token)
        self.frontier = next(self.steps)

    def so_far(self) -> TokenTree:
        return self.frontier.builder.tree().prune(self.policy.budget)

    def undrafted(self) -> list[tuple[int, int, int]]:
        """Return (node, its parent's node of the trie, token) of the frontier's nodes to draft. Those that a GPU has
        drafted ahead are entered in `known`.
        """
        frontier, known = self.frontier, self.known
        found, lacking = False, list[tuple[int, int, int]]()
        for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
            if node in known or parent not in known:
                continue
            if 0 < (there := self.trie.child.get((known[parent], token), 0)) <= self.trie.ahead:
                known[node], found = there, True
            else:
                lacking.append((node, known[parent], token))
        if self.adviser is not None and frontier.parents[0] >= 0 and not self.adviser.worth_drafting(frontier, known):
            lacking = []
        self.reach += found or bool(lacking)
        return lacking

    def candidates(self) -> Candidates:
        """Return what may follow the frontier's nodes."""
        rows: list[Following] = []
        frontier, known = self.frontier, self.known
        for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True):
            seen = self.trie.seen[known[node]] if node in known else None
            if self.adviser is not None:
                seen = self.adviser.candidates(node, parent, token, seen)
            rows.append(seen or ([], []))
        width = self.policy.top_k
        return Candidates([tokens[:width] for tokens, _ in rows], [prob[:width] for _, prob in rows])


def grow(
    growths: dict[int, Growth], forwards: Forwards, trees: dict[int, TokenTree], between_steps: BetweenSteps | None
) -> None:
    """Grow all trees to completion. trees: filled in, by the keys of `growths`."""
    while growths:
        if between_steps is not None:
            between_steps(lambda: trees | {row: growth.so_far() for row, growth in growths.items()})
        _expand(list(growths.values()), forwards)
        for row, growth in list(growths.items()):
            try:
                growth.frontier = growth.steps.send(growth.candidates())
            except StopIteration as end:
                trees[row], growth.trie.reach = end.value, growth.reach
                del growths[row]


def _expand(growths: list[Growth], forwards: Forwards) -> None:
    """Draft the frontiers' nodes that are not drafted yet and worth it, and enter them in `known`."""
    new = [(growth, *undrafted) for growth in growths for undrafted in growth.undrafted()]
    drafted = forwards.nodes([(growth.trie, parent, token) for growth, _, parent, token in new])
    for (growth, node, _, _), handle in zip(new, drafted, strict=True):
        growth.known[node] = handle
