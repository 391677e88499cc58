"""Retrieval's part in the growth of a head's trees."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from drafters.heads.growth.policies import Frontier
from drafters.hybrid.merge import Merge
from engine.core.outcomes import Following
from engine.core.tree import TokenTree


class RetrievalAdvice:
    """Retrieval's part in the growth of one tree (`drafters.heads.growth.lockstep.Advice`). retrieved: its tree over
    the same root.

    gain: accepted tokens that a draft of the head is expected to bring; needed: those that one of its forwards must
    yield to be worth its time. A forward below the root yields `rescue` for each next token that retrieval is expected
    to miss. one_pass: the first forward is the only one. expected_misses: those that retrieval is expected to
    miss where the head drafts, 0 if it does not.
    """

    def __init__(
        self, merge: Merge, retrieved: TokenTree, needed: float, gain: float, rescue: float, one_pass: bool = False
    ):
        self.merge, self.retrieved, self.one_pass = merge, retrieved, one_pass
        self.needed, self.gain, self.rescue, self.expected_misses = needed, gain, rescue, 0.0
        self._followings = followings(retrieved)
        self._place: dict[int, int | None] = {0: 0}  # node of the growing tree -> node of `retrieved`

    def begins(self) -> bool:
        """Return whether a draft of the head is worth its first forward, the one at the root."""
        self.expected_misses = max(0.0, 1 - sum(self._followings[0][1])) if self.gain > self.needed else 0.0
        return self.gain > self.needed

    def worth_drafting(self, frontier: Frontier, drafted: Container[int] = ()) -> bool:
        if self.one_pass:
            return True
        misses = {False: 0.0, True: 0.0}  # at nodes that are yet to be drafted, and at the others
        places = zip(frontier.nodes, frontier.parents, frontier.tokens, frontier.confidence, strict=True)
        for *place, prob in places:
            misses[place[0] in drafted] += prob * max(0.0, 1 - sum(self._known(*place)[1]))
        pays = misses[False] * self.rescue > self.needed
        self.expected_misses += misses[True] + misses[False] * pays
        return pays

    def candidates(self, node: int, parent: int, token: int, seen: Following | None) -> Following:
        return self.merge.following(seen, self._known(node, parent, token))

    def _known(self, node: int, parent: int, token: int) -> Following:
        """Return what retrieval proposes at the same place."""
        if node not in self._place:
            above = self._place[parent]
            self._place[node] = None if above is None else self.retrieved.child(above, token)
        place = self._place[node]
        return ([], []) if place is None else self._followings[place]


def followings(tree: TokenTree) -> list[Following]:
    """Return the tokens that `tree` has below each node, with the probability of each given that the node is right."""
    confidence = tree.confidence.tolist()
    found: list[Following] = [([], []) for _ in confidence]
    nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), confidence, strict=True)
    for token, parent, prob in islice(nodes, 1, None):
        found[parent][0].append(token)
        found[parent][1].append(prob / max(confidence[parent], 1e-9))
    return found
