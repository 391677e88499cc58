"""Suffix drafting: trees from the session index, over the request's own text and earlier answers."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Drafter, Verdict
from engine.config import Config
from engine.sampling import SamplingParams
from engine.tree import TokenTree
from retrieval_index.suffix import SessionIndex

SOURCE = 2


class SuffixDrafter(Drafter):
    """The likeliest `budget` nodes of the index's mixture; its probabilities are learned, so they are c(v) as they are.

    capacity: tokens of finished answers kept for later requests, 0: each request sees its own text only.
    """

    calibrated = True

    def __init__(self, budget: int = 32, length: int = 24, capacity: int = 1_000_000):
        self.budget, self.length = budget, length
        self.index = SessionIndex(capacity)

    @classmethod
    def from_config(cls, config: Config) -> SuffixDrafter:
        warm_up = cls(budget=4)  # kernels are compiled when first called: before the worker is ready, not in a request
        warm_up.start(0, [1, 2, 1], SamplingParams())
        warm_up.observe(0, Verdict(warm_up.propose(0, [2]), [0], [2]))
        warm_up.finish(0)
        return cls(config.drafter.budget)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.index.start(request, prompt)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return self.index.draft(request, continuation, self.budget, self.length, SOURCE)

    def observe(self, request: int, verdict: Verdict) -> None:
        self.index.append(request, verdict.tokens)

    def finish(self, request: int) -> None:
        self.index.finish(request)
