"""What a head has drafted after one request's text: a trie below the last synced token.

The tree of a round and those of all outcomes that the engine asks about share what was computed for common paths.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from drafters.heads.growth.policies import Candidates
from drafters.heads.growth.ranking import Ranking
from drafters.heads.session import Session, Unranked
from engine.core.outcomes import Following


@dataclass(eq=False)
class Trie:
    """A request's text and the nodes below it, numbered as in its session.

    child: (node, token) -> the child node. depth: of each node. seen: what the head predicts after it. ahead: the last
    of the nodes that a GPU drafted before they were asked for, all of which come first. reach: layers that the head
    drafted of its latest tree, below the root's candidates.
    """

    text: list[int]
    session: Session
    ranking: Ranking
    child: dict[tuple[int, int], int] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=lambda: {0: 0})
    seen: dict[int, Following] = field(default_factory=dict)
    ahead: int = 0
    reach: int = sys.maxsize

    def forget_nodes(self) -> None:
        self.child, self.depth, self.seen, self.ahead = {}, {0: 0}, {}, 0

    def commit(self, start: int, features: Tensor | None) -> None:
        """Commit true features of the text's positions from `start` on: see `Session.commit`."""
        self.session.commit(start, features, self.text[start + 1 :])
        self.forget_nodes()

    def unsynced(self) -> list[int]:
        """Return the tokens after node 0 whose features have not come (yet): they are drafted like a continuation,
        without features.
        """
        return self.text[self.session.synced + 1 :] if self.session.synced else []

    def place(self, continuation: Sequence[int]) -> TriePlace:
        """Return the place at the end of the continuation."""
        return TriePlace(self, [*self.unsynced(), *continuation])

    def seen_along(self, continuation: Sequence[int]) -> list[Following]:
        """Return what the head predicted after the text and after each token of `continuation`, as far as it has
        drafted.
        """
        unsynced, nodes = self.unsynced(), [0]
        for token in [*unsynced, *continuation]:
            if (following := self.child.get((nodes[-1], token))) is None:
                break
            nodes.append(following)
        return [self.seen[node] for node in nodes[len(unsynced) :] if node in self.seen]

    def sees_no_further(self, parent: int) -> bool:
        """Return whether the head predicts nothing after this node's children."""
        limit = self.session.depth_limit
        return limit is not None and self.depth[parent] + 1 >= limit

    def end(self, parent: int, token: int) -> None:
        """Add a node after which nothing is predicted. The session does not know it, so its number is negative."""
        node = self.child[parent, token] = -1 - len(self.child)
        self.depth[node], self.seen[node] = self.depth[parent] + 1, ([], [])

    def after(self, nodes: list[int], logits: Tensor | None) -> Unranked:
        """Return what is to be ranked after these nodes."""
        first = nodes if logits is None else nodes[: len(logits)]
        positions = [self.session.synced + 1 + self.depth[node] for node in first]
        return Unranked(self.session, self.ranking, nodes, logits, positions)

    def note(self, nodes: list[int], seen: Candidates) -> None:
        """Store what the head predicts after each node."""
        for row, node in enumerate(nodes):
            row = row if len(seen.tokens) > 1 else 0
            self.seen[node] = (seen.tokens[row], seen.prob[row])


class TriePlace(NamedTuple):
    """A place in a trie: a path from node 0."""

    trie: Trie
    path: list[int]
