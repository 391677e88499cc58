"""The session index: what this request and earlier answers said after the same words.

Two stores of counted n-grams (`retrieval_index.ngrams`): one per request with its prompt and output, and one bounded
cache of finished answers for all requests. A token's chance is a mixture of what followed each context length in each
store; the weights are learned online from every token that is appended, so that they are acceptance probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree

if TYPE_CHECKING:
    from retrieval_index.ngrams import Store

CONTEXT = 8  # last tokens of the prompt that are kept with an answer, so that its beginning has a context


@dataclass
class _Request:
    """own: its text. matches: [2, 2] int64, see `ngrams.append`. prompt: its length in tokens."""

    own: Store
    matches: NDArray[np.int64]
    prompt: int


class SessionIndex:
    """Drafts from the live requests' texts and a cache of at most `capacity` tokens of finished answers."""

    def __init__(self, capacity: int = 1_000_000):
        from retrieval_index import ngrams  # numba: half a second that only users of the index pay

        self._kernels: Any = ngrams
        self.capacity = capacity
        self.shared = ngrams.new_store(max(capacity, 1))
        self.weights = np.zeros((ngrams.COMPONENTS, ngrams.BUCKETS, 2))
        self.weights[..., 0] = 0.5
        self._requests: dict[int, _Request] = {}

    def start(self, request: int, prompt: Sequence[int]) -> None:
        """Index a prompt. Nothing is learned from it: it is not what the target says."""
        self._requests[request] = _Request(
            self._kernels.new_store(2 * len(prompt) + 512), np.zeros((2, 2), np.int64), len(prompt)
        )
        self._append(self._requests[request], np.asarray(prompt, np.int32), learn=False)

    def append(self, request: int, tokens: Sequence[int]) -> None:
        """The request's answer goes on with `tokens`."""
        self._append(self._requests[request], np.asarray(tokens, np.int32), learn=True)

    def draft(
        self, request: int, continuation: Sequence[int] = (), budget: int = 17, depth: int = 24, source: int = 0
    ) -> TokenTree:
        """The likeliest continuations of the request's text and `continuation`, at most `budget` nodes, root included."""
        state = self._requests[request]
        tokens, parents = np.empty(budget, np.int32), np.empty(budget, np.int32)
        confidence = np.empty(budget, np.float64)
        n = self._kernels.draft(
            state.own, self.shared, self.weights, state.matches, np.asarray(continuation, np.int32),
            budget, depth, 1e-4, tokens, parents, confidence,
        )  # fmt: skip
        sources = np.full(n, source, np.uint8)
        sources[0] = 0
        return TokenTree(tokens[:n], parents[:n], confidence[:n].astype(np.float32), sources)

    def finish(self, request: int) -> None:
        """Forget the request; its answer goes to the shared cache."""
        state = self._requests.pop(request)
        if not self.capacity:
            return
        text = state.own.text[max(state.prompt - CONTEXT, 0) : state.own.state[self._kernels.END]]
        text = np.concatenate([text, np.asarray([self._kernels.SEPARATOR], np.int32)])
        done = 0
        while done < len(text):
            done += self._kernels.remember(self.shared, text[done:], self.capacity)
            if done < len(text):
                self.shared = self._grown(self.shared)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the shared cache, separators included."""
        return int(self.shared.state[self._kernels.END] - self.shared.state[self._kernels.START])

    def _append(self, state: _Request, tokens: NDArray[np.int32], learn: bool) -> None:
        done = 0
        while done < len(tokens):
            done += self._kernels.append(state.own, self.shared, self.weights, state.matches, tokens[done:], learn)
            if done < len(tokens):
                state.own = self._grown(state.own)

    def _grown(self, store: Store) -> Store:
        """The store with those of its arrays doubled that are nearly full."""
        ngrams = self._kernels
        if 4 * (store.state[ngrams.USED] + ngrams.ORDERS) > 3 * len(store.slots):
            slots = np.zeros((2 * len(store.slots), 4), np.int32)
            ngrams.rehash(store.slots, slots)
            store = store._replace(slots=slots)
        if store.state[ngrams.TOP] + ngrams.ROOM > len(store.pool):
            store = store._replace(pool=np.concatenate([store.pool, np.zeros_like(store.pool)]))
        if store.state[ngrams.END] - store.state[ngrams.START] + 1 >= len(store.text):
            store = store._replace(text=_unrolled(store.text, int(store.state[ngrams.START])))
        return store


def _unrolled(ring: NDArray[np.int32], start: int) -> NDArray[np.int32]:
    """A ring of twice the size with every position in its place."""
    twice = np.zeros(2 * len(ring), np.int32)
    positions = start + np.arange(len(ring))
    twice[positions % len(twice)] = ring[positions % len(ring)]
    return twice
