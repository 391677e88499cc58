"""PLD, prompt lookup decoding (Saxena 2023): what followed the last n tokens the first time they occurred."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Drafter, Verdict
from engine.config import Config
from engine.sampling import SamplingParams
from engine.tree import TokenTree

SOURCE = 1


class PromptLookup(Drafter):
    """As published: n-grams of `max_ngram` down to `min_ngram` tokens, the first match in the context, a chain of
    `length` tokens. first[n] maps each n-gram to the position behind its first occurrence.
    """

    acceptance = 0.6
    """Assumed chance of each next token, for c(v) only; the published method has none."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, length: int = 10):
        self.ngrams = range(max_ngram, min_ngram - 1, -1)
        self.length = length
        self.texts: dict[int, list[int]] = {}
        self.first: dict[int, dict[tuple[int, ...], int]] = {}

    @classmethod
    def from_config(cls, config: Config) -> PromptLookup:
        options = config.drafter
        return cls(options.max_ngram, options.min_ngram, min(options.length, options.budget - 1))

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.texts[request], self.first[request] = [], {}
        self._append(request, prompt)

    def observe(self, request: int, verdict: Verdict) -> None:
        self._append(request, verdict.tokens)

    def finish(self, request: int) -> None:
        del self.texts[request], self.first[request]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        text, first = self.texts[request], self.first[request]
        end = (text[-self.ngrams.start :] + list(continuation)) if continuation else text[-self.ngrams.start :]
        for n in self.ngrams:
            at = first.get(tuple(end[-n:])) if n <= len(end) else None
            if at is not None and at < len(text):
                chain = text[at : at + self.length]
                return TokenTree.chain(end[-1], chain, [self.acceptance ** (i + 1) for i in range(len(chain))], SOURCE)
        return TokenTree.root_only(end[-1])

    def _append(self, request: int, tokens: Sequence[int]) -> None:
        text, first = self.texts[request], self.first[request]
        for token in tokens:
            text.append(token)
            for n in self.ngrams:
                if n <= len(text):
                    first.setdefault(tuple(text[-n:]), len(text))
