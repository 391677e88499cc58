"""Token Recycling (Luo et al. 2024): each token's latest candidate successors, followed as a tree.

The successors are the top 8 of the target's logits where the token was last verified; for tokens seen only in a
prompt, those that followed them, latest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from drafters.base import Drafter, Verdict
from drafters.calibration import Calibrator
from engine.config import Config
from engine.sampling import SamplingParams
from engine.tree import TokenTree


class TokenRecycling(Drafter):
    """The table is shared by all requests. Trees grow best-first by the learned chance of a successor's rank; the paper
    has a fixed shape of as many nodes, the best one for the ranks' chances.
    """

    calibrated = True
    successors = 8

    def __init__(self, successors: int = 8, budget: int = 81, depth: int = 6):
        self.width, self.budget, self.depth = successors, budget, depth
        self.table: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.calibrator = Calibrator()

    @classmethod
    def from_config(cls, config: Config) -> TokenRecycling:
        return cls(budget=config.drafter.budget)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        for token, following in pairwise(prompt):
            self._note(token, following)
        self.last[request] = prompt[-1]

    def recycle(self, token: int, successors: Sequence[int]) -> None:
        """The target ranked these highest after `token`, best first."""
        self.table[token] = list(successors[: self.width])

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        root = continuation[-1] if continuation else self.last[request]
        tokens, parents, confidence, depths = [root], [-1], [1.0], [0]
        waiting: list[tuple[float, int, int]] = []  # (-c, parent, token)
        node = 0
        while True:
            if depths[node] < self.depth:
                for rank, token in enumerate(self.table.get(tokens[node], ())):
                    chance = confidence[node] * self._chance(depths[node] + 1, rank)
                    heapq.heappush(waiting, (-chance, node, token))
            if not waiting or len(tokens) == self.budget:
                break
            score, parent, token = heapq.heappop(waiting)
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            confidence.append(-score)
            depths.append(depths[parent] + 1)
        return TokenTree.from_lists(tokens, parents, confidence)

    def observe(self, request: int, verdict: Verdict) -> None:
        ranked = [] if verdict.successors is None else verdict.successors.tolist()
        for depth, token in enumerate(verdict.tokens, start=1):
            last = self.last[request]
            for rank, guess in enumerate(self.table.get(last, ())):
                self.calibrator.observe(depth, rank, guess == token)
            self._note(last, token)
            self.last[request] = token
        for token, successors in zip(verdict.tree.tokens.tolist(), ranked, strict=False):
            if successors[0] >= 0:  # the node was verified
                self.recycle(token, successors)

    def finish(self, request: int) -> None:
        del self.last[request]

    def _chance(self, depth: int, rank: int) -> float:
        return self.calibrator.chance(depth, rank, 0.25 / (rank + 1))

    def _note(self, token: int, following: int) -> None:
        row = self.table.setdefault(token, [])
        if following in row:
            row.remove(following)
        row.insert(0, following)
        del row[self.width :]
