"""Suffix drafting over the request's own text: what followed the longest recent contexts, as a tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from drafters.base import Drafter, Verdict
from engine.config import Config
from engine.sampling import SamplingParams
from engine.tree import TokenTree

SOURCE = 2
_ORDERS = (16, 12, 8, 6, 5, 4, 3, 2, 1)
_OCCURRENCES = 8  # places looked at, those of longer contexts and later ones first


class SuffixDrafter(Drafter):
    """Finds earlier places of the text's last n tokens, for falling n, and grows one tree of what followed them.

    A place speaks with the length of its match: a token's conditional chance is the weight of the places it followed
    over the weight of all places at its node plus one, and c(v) the product on the path. Nodes are expanded best first.
    """

    def __init__(self, budget: int = 32, length: int = 10):
        self.budget, self.length = budget, length
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, dict[tuple[int, ...], list[int]]] = {}

    @classmethod
    def from_config(cls, config: Config) -> SuffixDrafter:
        return cls(config.drafter.budget, config.drafter.length)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.texts[request], self.ends[request] = [], {}
        self._append(request, prompt)

    def observe(self, request: int, verdict: Verdict) -> None:
        self._append(request, verdict.tokens)

    def finish(self, request: int) -> None:
        del self.texts[request], self.ends[request]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        context = self.texts[request][-_ORDERS[0] :] + list(continuation)
        return self._grow(self.texts[request], context[-1], self._places(request, context))

    def _places(self, request: int, context: list[int]) -> list[tuple[int, int]]:
        """(position behind an earlier occurrence, length of its match), each position with its longest match."""
        text, ends = self.texts[request], self.ends[request]
        places: dict[int, int] = {}
        for n in _ORDERS:
            if n <= len(context):
                for at in reversed(ends.get(tuple(context[-n:]), ())[-_OCCURRENCES - 1 :]):
                    if at < len(text) and len(places) < _OCCURRENCES:
                        places.setdefault(at, n)
        return list(places.items())

    def _grow(self, text: list[int], root: int, places: list[tuple[int, int]]) -> TokenTree:
        tokens, parents, confidence = [root], [-1], [1.0]
        frontier = [(-1.0, 0, 0, places)]  # (-confidence, node, depth, its places)
        while frontier and len(tokens) < self.budget:
            chance, node, depth, here = heapq.heappop(frontier)
            if depth == self.length:
                continue
            followers: dict[int, list[tuple[int, int]]] = {}
            for at, weight in here:
                if at < len(text):
                    followers.setdefault(text[at], []).append((at + 1, weight + 1))
            total = sum(weight for _, weight in here) + 1
            for token, behind in followers.items():
                if len(tokens) < self.budget:
                    step = sum(weight - 1 for _, weight in behind) / total
                    heapq.heappush(frontier, (chance * step, len(tokens), depth + 1, behind))
                    tokens.append(token)
                    parents.append(node)
                    confidence.append(-chance * step)
        return TokenTree.from_lists(tokens, parents, confidence, SOURCE)

    def _append(self, request: int, tokens: Sequence[int]) -> None:
        text, ends = self.texts[request], self.ends[request]
        for token in tokens:
            text.append(token)
            for n in _ORDERS:
                if n <= len(text):
                    ends.setdefault(tuple(text[-n:]), []).append(len(text))
