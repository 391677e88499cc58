"""The session index: what followed the same words in this request and in earlier answers.

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

from engine.sampling import SamplingParams
from engine.tree import TokenTree

if TYPE_CHECKING:
    from retrieval_index.ngrams import Store

BYTES_PER_TOKEN = 200  # of `capacity`: the cache takes no more, whatever the text; twice that while it grows
GREEDY = SamplingParams()
CONTEXT = 8  # last tokens of the prompt that are kept with an answer, so that its beginning has a context


@dataclass
class _Request:
    """own: its text. passages, prompt: how many tokens come before its prompt, and before its answer."""

    own: Store
    passages: int
    prompt: int


class SessionIndex:
    """Drafts from the live requests' texts and a cache of at most `capacity` tokens of finished answers."""

    def __init__(self, capacity: int = 1_000_000):
        from engine import noise_bits  # numba: half a second that only users of the index pay
        from retrieval_index import ngrams

        self._kernels: Any = ngrams
        self._keys_from = noise_bits.keys_from
        self.capacity = capacity
        self.shared = self._new_store(max(capacity, 1))
        self.weights = np.zeros((ngrams.COMPONENTS, ngrams.BUCKETS, 2))
        self.weights[..., 0] = 0.5
        self._requests: dict[int, _Request] = {}

    def start(self, request: int, prompt: Sequence[int], passages: Sequence[Sequence[int]] = ()) -> None:
        """Index a prompt, and passages as if they came before it. Nothing is learned from them."""
        before = [token for passage in passages for token in (*passage, self._kernels.SEPARATOR)]
        text = [*before, *prompt]
        self._requests[request] = _Request(self._new_store(len(text) + 512), len(before), len(text))
        self._append(self._requests[request], np.asarray(text, np.int32), learn=False)

    def append(self, request: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the request's answer."""
        self._append(self._requests[request], np.asarray(tokens, np.int32), learn=True)

    def draft(
        self,
        request: int,
        continuation: Sequence[int] = (),
        budget: int = 17,
        depth: int = 24,
        sampling: SamplingParams = GREEDY,
    ) -> TokenTree:
        """The likeliest continuations of text and `continuation`, at most `budget` nodes, root included. sampling:
        how the target draws; the noise of that draw is known, so it ranks the continuations too."""
        own, shared = self._requests[request].own, self.shared
        noise = _NO_NOISE
        if not sampling.greedy:
            position = int(own.state[self._kernels.END]) - self._requests[request].passages + len(continuation)
            noise = self._keys_from(sampling.seed, position, depth)
        tree, confidence = np.empty((2, budget), np.int32), np.empty(budget, np.float32)
        asked = np.asarray(continuation, np.int32) if continuation else _NOTHING
        n = self._kernels.draft(
            *(*own, *shared, self.weights, asked, depth, 1e-4),
            *(noise, min(sampling.temperature, 1.0), tree, confidence),
        )
        return TokenTree(tree[0, :n], tree[1, :n], confidence[:n], np.zeros(n, np.uint32))

    def finish(self, request: int) -> None:
        """Forget the request; its answer goes to the shared cache."""
        request_state = self._requests.pop(request)
        if not self.capacity:
            return
        own = request_state.own
        text = self._kernels.parts(*own)[2][max(request_state.prompt - CONTEXT, 0) : own.state[self._kernels.END]]
        self.remember(np.append(text, np.int32(self._kernels.SEPARATOR)))

    def remember(self, text: NDArray[np.int32]) -> None:
        """Cache finished answers, SEPARATOR after each, evicting the oldest tokens beyond `capacity`."""
        done = 0
        while done < len(text):
            done += self._kernels.remember(self.shared.arena, self.shared.state, text[done:], self.capacity)
            if done < len(text):
                self.shared = self._grown(self.shared)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the shared cache, separators included."""
        return int(self.shared.state[self._kernels.END] - self.shared.state[self._kernels.START])

    def _append(self, request: _Request, tokens: NDArray[np.int32], learn: bool) -> None:
        done, shared = 0, self.shared
        while done < len(tokens):
            own = request.own
            done += self._kernels.append(
                own.arena, own.state, shared.arena, shared.state, self.weights, tokens[done:], learn
            )
            if done < len(tokens):
                request.own = self._grown(own)

    def _new_store(self, tokens: int) -> Store:
        size = 1 << max(9, (tokens + 1).bit_length())
        store: Store = self._kernels.new_store(slots=2 * size, pool=size, ring=size, heads=size)
        return store

    def _grown(self, store: Store) -> Store:
        """A copy in which the nearly full parts are doubled."""
        k = self._kernels
        state = store.state.tolist()
        slots, pool, ring, heads = state[k.SLOTS : k.HEADS + 1]
        if 2 * (state[k.USED] + k.ORDERS) > slots:
            slots *= 2
        if 3 * state[k.TOP] + 4 * k.ROOM > 2 * pool:
            pool *= 2
        if state[k.END] - state[k.START] + 1 >= ring // 2:
            ring, heads = 2 * ring, 2 * heads
        bigger: Store = k.new_store(slots, pool, ring, heads)
        k.copy_into(*store, *bigger)
        return bigger


_NOTHING, _NO_NOISE = np.empty(0, np.int32), np.empty(0, np.uint64)
