"""Suffix drafting over the request's own text: what followed the longest recent contexts, as a tree."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Drafter, Verdict
from engine.config import Config
from engine.sampling import SamplingParams
from engine.tree import TokenTree

SOURCE = 2
_ORDERS = (16, 12, 8, 6, 5, 4, 3, 2, 1)
_OCCURRENCES = 8  # the latest of each context that are looked at


class SuffixDrafter(Drafter):
    """Looks up the text's last n tokens for falling n and merges the continuations of their latest occurrences.

    A continuation after a context of n tokens that occurred k times, m of them followed alike, gets the conditional
    chance (m + 0) / (k + 1), times the trust in a match of n tokens, n / (n + 1) : c(v) is their product on the path.
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
        text, ends = self.texts[request], self.ends[request]
        context = text[-_ORDERS[0] :] + list(continuation)
        tree = TokenTree.root_only(context[-1])
        for n in _ORDERS:
            if n > len(context):
                continue
            places = [at for at in ends.get(tuple(context[-n:]), ())[-_OCCURRENCES:] if at < len(text)]
            if places:
                tree = tree.union(self._continuations(text, places, n, context[-1]))
            if len(tree) >= self.budget:
                break
        return tree.prune(self.budget)

    def _continuations(self, text: list[int], places: list[int], n: int, root: int) -> TokenTree:
        """The trie of what followed the context of length n at `places`."""
        tokens, parents, at_node = [root], [-1], [places]
        confidence = [1.0]
        node = 0
        depth = {0: 0}
        while node < len(tokens) and len(tokens) < self.budget:
            followers: dict[int, list[int]] = {}
            for at in at_node[node]:
                if at < len(text):
                    followers.setdefault(text[at], []).append(at + 1)
            if depth[node] < self.length:
                for token, behind in sorted(followers.items(), key=lambda item: -len(item[1])):
                    depth[len(tokens)] = depth[node] + 1
                    chance = len(behind) / (len(at_node[node]) + 1) if len(places) > 1 else 0.7
                    tokens.append(token)
                    parents.append(node)
                    at_node.append(behind)
                    confidence.append(confidence[node] * chance * (n + depth[node]) / (n + depth[node] + 1))
            node += 1
        return TokenTree.from_lists(tokens, parents, confidence, SOURCE)

    def _append(self, request: int, tokens: Sequence[int]) -> None:
        text, ends = self.texts[request], self.ends[request]
        for token in tokens:
            text.append(token)
            for n in _ORDERS:
                if n <= len(text):
                    ends.setdefault(tuple(text[-n:]), []).append(len(text))
