"""Retrieval's part in the growth of a head's trees."""

from __future__ import annotations

from itertools import islice

from drafters.heads.growth.policies import Frontier
from drafters.hybrid.merge import Merge
from engine.core.outcomes import Following
from engine.core.tree import TokenTree


class RetrievalAdvice:
    """Retrieval's part in the growth of one tree (`drafters.heads.growth.lockstep.Advice`). retrieved: its tree over
    the same root.

    needed: the accepted tokens that a forward of the head must yield to be worth its time. It gains where retrieval
    misses the next token and the head's is accepted; `rescue` is the chance of the latter, given the former. one_pass:
    the first forward is the only one.
    """

    def __init__(self, merge: Merge, retrieved: TokenTree, needed: float, rescue: float, one_pass: bool = False):
        self.merge, self.retrieved, self.needed, self.rescue = merge, retrieved, needed, rescue
        self.one_pass = one_pass
        self._followings = followings(retrieved)
        self._place: dict[int, int | None] = {0: 0}  # node of the growing tree -> node of `retrieved`

    def worth_drafting(self, frontier: Frontier) -> bool:
        return self.one_pass or self.surplus(frontier) > 0

    def surplus(self, frontier: Frontier) -> float:
        """Accepted tokens that a step over these nodes is expected to yield, less `needed`."""
        gain = 0.0
        for node, parent, token, confidence in zip(
            frontier.nodes, frontier.parents, frontier.tokens, frontier.confidence, strict=True
        ):
            known = sum(self._known(node, parent, token)[1])
            gain += confidence * max(0.0, 1 - known) * self.rescue
        return gain - self.needed

    def candidates(self, node: int, parent: int, token: int, seen: Following | None) -> Following:
        return self.merge.following(seen, self._known(node, parent, token))

    def _known(self, node: int, parent: int, token: int) -> Following:
        """What retrieval proposes at the same place."""
        if node not in self._place:
            above = self._place[parent]
            self._place[node] = None if above is None else self.retrieved.child(above, token)
        place = self._place[node]
        return ([], []) if place is None else self._followings[place]


def followings(tree: TokenTree) -> list[Following]:
    """The tokens that `tree` has below each node, with the chance of each given that the node is right."""
    confidence = tree.confidence.tolist()
    found: list[Following] = [([], []) for _ in confidence]
    nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), confidence, strict=True)
    for token, parent, prob in islice(nodes, 1, None):
        found[parent][0].append(token)
        found[parent][1].append(prob / max(confidence[parent], 1e-9))
    return found
