"""Trees that grow in lockstep: each turn expands all their frontiers in one forward."""

from __future__ import annotations

from typing import Protocol

from drafters.heads.forwards import Forwards
from drafters.heads.growth.policies import Candidates, Frontier, Policy
from drafters.heads.growth.trie import Trie
from engine.core.drafter_protocol import BetweenSteps
from engine.core.outcomes import Following
from engine.core.tree import TokenTree


class Advice(Protocol):
    """Another source's part in the growth of one tree."""

    def worth_drafting(self, frontier: Frontier) -> bool:
        """Return whether the head should expand these nodes; otherwise the other source continues alone."""

    def candidates(self, node: int, parent: int, token: int, seen: Following | None) -> Following:
        """Return what may follow a node of the growing tree, given the head's prediction there (None: not drafted)."""


class Growth:
    """A tree that grows from the node `root` of a trie, below `token`. known: node of the tree -> node of the trie."""

    def __init__(self, trie: Trie, root: int, token: int, policy: Policy, adviser: Advice | None):
        self.trie, self.policy, self.adviser = trie, policy, adviser
        self.known = {0: root}
        self.steps = policy.steps(token)
        self.frontier = next(self.steps)

    def so_far(self) -> TokenTree:
        return self.frontier.builder.tree().prune(self.policy.budget)

    def undrafted(self) -> list[tuple[int, int, int]]:
        """Return (node, its parent's node of the trie, token) of the frontier's nodes to draft."""
        frontier, known = self.frontier, self.known
        if self.adviser is not None and frontier.parents[0] >= 0 and not self.adviser.worth_drafting(frontier):
            return []
        return [
            (node, known[parent], token)
            for node, parent, token in zip(frontier.nodes, frontier.parents, frontier.tokens, strict=True)
            if node not in known and parent in known
        ]

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
                trees[row] = end.value
                del growths[row]


def _expand(growths: list[Growth], forwards: Forwards) -> None:
    """Draft the frontiers' nodes that are not drafted yet and worth it, and enter them in `known`."""
    new = [(growth, *undrafted) for growth in growths for undrafted in growth.undrafted()]
    drafted = forwards.nodes([(growth.trie, parent, token) for growth, _, parent, token in new])
    for (growth, node, _, _), handle in zip(new, drafted, strict=True):
        growth.known[node] = handle
