"""REST (He et al. 2024): what followed the longest match of the context in a corpus, as a trie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters.calibration import Calibrator
from drafters.parts import datastore_path, naming
from engine.config import Config
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.weights.tokenizer import load_tokenizer
from retrieval_index.datastore import Datastore


class DatastoreDrafter(Drafter):
    """As published: matches of `longest` down to `shortest` tokens, the trie's most frequent `budget` nodes.

    c(v): the share of continuations that go through the node, times the learned probability that a match of that length
    is right.
    """

    calibrated = True

    def __init__(
        self,
        path: str | Path,
        longest: int = 16,
        shortest: int = 2,
        budget: int = 65,
        depth: int = 10,
        tokenizer: Any = None,
    ):
        self.store = Datastore(Path(path), tokenizer)
        self.longest, self.shortest, self.budget, self.depth = longest, shortest, budget, depth
        self.context: dict[int, list[int]] = {}
        self.calibrator = Calibrator()

    @classmethod
    def from_config(cls, config: Config) -> DatastoreDrafter:
        with naming("drafter.datastore"):
            drafter = cls(datastore_path(config), budget=config.drafter.budget, tokenizer=load_tokenizer(config.model))
        drafter.store.prepare()  # before the worker is ready, not during a request
        return drafter

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.context[request] = list(prompt[-self.longest :])

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        length, raw = self._trie(self.context[request] + list(continuation))
        if len(raw) == 1:
            return raw
        return TokenTree(raw.tokens, raw.parents, self._calibrated(length, raw), raw.source)

    def observe(self, request: int, verdict: Verdict) -> None:
        length, raw = self._trie(self.context[request])
        if len(raw) > 1:
            known = [child for child in raw.children(0) if int(raw.tokens[child]) == verdict.tokens[0]]
            promised = float(raw.confidence[raw.children(0)].sum())
            # There is one observation: whether the match was right at all.
            self.calibrator.observe(1, length, bool(known) and promised > 0)
        self.context[request] = (self.context[request] + list(verdict.tokens))[-self.longest :]

    def finish(self, request: int) -> None:
        del self.context[request]

    def _trie(self, context: list[int]) -> tuple[int, TokenTree]:
        """Return the match's length and the trie below the context's last token, its confidence the share of
        occurrences.
        """
        from retrieval_index.suffix_array import likeliest

        length, rows = self.store.continuations(context, self.longest, self.shortest, self.depth)
        if length == 0:
            return 0, TokenTree.root_only(context[-1])
        tokens, parents, shares = likeliest(rows, context[-1], self.budget)
        shares[0] = 1.0
        return length, TokenTree(tokens, parents, shares.astype(np.float32), np.zeros(len(tokens), np.uint32))

    def _calibrated(self, length: int, raw: TokenTree) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Multiply the match's probability in once per step, since each step of a path must be right as well."""
        trust = self.calibrator.prob(1, length, length / (length + 3))
        confidence: np.ndarray[Any, np.dtype[np.float32]] = (raw.confidence * trust**raw.depths).astype(np.float32)
        return confidence
