"""PLD, prompt lookup decoding (Saxena 2023): what followed the last n tokens the first time they occurred."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.calibration import Calibrator
from engine.config import Config
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree


class PromptLookup(Drafter):
    """Drafts as published: it looks up n-grams of three tokens down to one, and copies `length` tokens from behind the
    first match. first[n] maps each n-gram to the position after its first occurrence.
    """

    acceptance = 0.6
    """The prior probability of each next token, for c(v) only: the published method has none."""

    calibrated = True
    ngrams = range(3, 0, -1)

    def __init__(self, length: int = 10):
        self.length = length
        self.texts: dict[int, list[int]] = {}
        self.first: dict[int, dict[tuple[int, ...], int]] = {}
        self.calibrator = Calibrator()

    @classmethod
    def from_config(cls, config: Config) -> PromptLookup:
        options = config.drafter
        return cls(min(options.length or 10, options.budget - 1))

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.texts[request], self.first[request] = [], {}
        self._append(request, prompt)

    def observe(self, request: int, verdict: Verdict) -> None:
        n, chain = self._lookup(request, self.texts[request][-self.ngrams.start :])
        for depth, (guess, token) in enumerate(zip(chain, verdict.tokens, strict=False), start=1):
            self.calibrator.observe(depth, n, guess == token)
            if guess != token:
                break
        self._append(request, verdict.tokens)

    def finish(self, request: int) -> None:
        del self.texts[request], self.first[request]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        text = self.texts[request]
        end = text[-self.ngrams.start :] + list(continuation)
        n, chain = self._lookup(request, end)
        confidence, path = [], 1.0
        for depth in range(1, len(chain) + 1):
            path *= self.calibrator.prob(depth, n, self.acceptance)
            confidence.append(path)
        return TokenTree.chain(end[-1], chain, confidence)

    def _lookup(self, request: int, end: list[int]) -> tuple[int, list[int]]:
        """Return the length of the n-gram at `end` that occurred before, and what followed it; (0, []) if none did."""
        text, first = self.texts[request], self.first[request]
        for n in self.ngrams:
            at = first.get(tuple(end[-n:])) if n <= len(end) else None
            if at is not None and at < len(text):
                return n, text[at : at + self.length]
        return 0, []

    def _append(self, request: int, tokens: Sequence[int]) -> None:
        text, first = self.texts[request], self.first[request]
        for token in tokens:
            text.append(token)
            for n in self.ngrams:
                if n <= len(text):
                    first.setdefault(tuple(text[-n:]), len(text))
