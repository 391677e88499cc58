"""Token Recycling (Luo et al. 2024): each token's latest candidate successors, followed as a tree.

The successors are the top 8 of the target's logits where the token was last verified; for tokens seen only in a
prompt, those that followed them, latest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from drafters.calibration import Calibrator
from engine.config import Config
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from retrieval_index.memories import Memories

Table = dict[int, list[int]]
"""The candidate successors of each token, best first."""


class TokenRecycling(Drafter):
    """The requests of one owner (`Speculation.owner`) share a table. Trees grow best-first by the learned probability
    of a successor's rank; the paper has a fixed shape of as many nodes, the best one for the ranks' probabilities.

    capacity: rows of all tables; beyond it, those of the least recently used owners are forgotten first.
    """

    calibrated = True
    successors = 8

    def __init__(self, successors: int = 8, budget: int = 81, depth: int = 6, capacity: int = 1 << 18):
        self.width, self.budget, self.depth = successors, budget, depth
        self.memories: Memories[Table] = Memories(capacity)
        self.tables: dict[int, Table] = {}  # tables of the requests
        self.owners: dict[int, str | None] = {}
        self.last: dict[int, int] = {}
        self.calibrator = Calibrator()

    @classmethod
    def from_config(cls, config: Config) -> TokenRecycling:
        return cls(budget=config.drafter.budget)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        known = self.memories.of(sampling.owner)
        self.tables[request] = table = {} if known is None else known
        self.owners[request] = sampling.owner
        self._keep(request)
        for token, following in pairwise(prompt):
            self._note(table, token, following)
        self.last[request] = prompt[-1]

    def recycle(self, request: int, token: int, successors: Sequence[int]) -> None:
        """Note that the target ranked these highest after `token`, best first."""
        self.tables[request][token] = list(successors[: self.width])

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        table = self.tables[request]
        root = continuation[-1] if continuation else self.last[request]
        tokens, parents, confidence, depths = [root], [-1], [1.0], [0]
        waiting: list[tuple[float, int, int]] = []  # (-c, parent, token)
        node = 0
        while True:
            if depths[node] < self.depth:
                for rank, token in enumerate(table.get(tokens[node], ())):
                    prob = confidence[node] * self._prob(depths[node] + 1, rank)
                    heapq.heappush(waiting, (-prob, node, token))
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
        table = self.tables[request]
        ranked = [] if verdict.successors is None else verdict.successors.tolist()
        for depth, token in enumerate(verdict.tokens, start=1):
            last = self.last[request]
            for rank, guess in enumerate(table.get(last, ())):
                self.calibrator.observe(depth, rank, guess == token)
            self._note(table, last, token)
            self.last[request] = token
        for token, successors in zip(verdict.tree.tokens.tolist(), ranked, strict=False):
            if successors[0] >= 0:  # the node was verified
                self.recycle(request, token, successors)

    def finish(self, request: int) -> None:
        self._keep(request)
        del self.last[request], self.tables[request], self.owners[request]

    def _keep(self, request: int) -> None:
        self.memories.keep(self.owners[request], self.tables[request], len(self.tables[request]))

    def _prob(self, depth: int, rank: int) -> float:
        return self.calibrator.prob(depth, rank, 0.25 / (rank + 1))

    def _note(self, table: Table, token: int, following: int) -> None:
        row = table.setdefault(token, [])
        if following in row:
            row.remove(following)
        row.insert(0, following)
        del row[self.width :]
