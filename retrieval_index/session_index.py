"""The session index: what followed the same words in this request and in earlier answers.

It has three stores of counted n-grams (`retrieval_index.ngrams`): one per request with its prompt and output, one per
owner of requests with the answers to them, all bounded together, and one of public answers. A token's probability is a
mixture of what followed each context length in each store; the weights are learned online from every token that is
appended, so that they are acceptance probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from retrieval_index.memories import Memories

if TYPE_CHECKING:
    from retrieval_index.ngrams import Store
    from retrieval_index.saved_answers import SavedAnswers

BYTES_PER_TOKEN = 200  # of `capacity`: memories take no more, whatever the text; twice that while one grows
GREEDY = SamplingParams()
CONTEXT = 8  # last tokens of the prompt that are kept with an answer, so that its beginning has a context


@dataclass
class _Request:
    """One request's stores. own: its text. owner: whose memory it shares, None: nobody's. prompt: how many tokens come
    before its answer.
    """

    own: Store
    owner: str | None
    prompt: int


class SessionIndex:
    """Drafts from a request's own text, at most `capacity` tokens of its owner's finished answers, and public answers.

    capacity: of all owners together. public: SEPARATOR after each answer. saved: where finished answers outlive the
    process.
    """

    def __init__(
        self, capacity: int = 1_000_000, public: Sequence[NDArray[np.int32]] = (), saved: SavedAnswers | None = None
    ):
        from engine.sampling import noise_bits  # numba takes half a second, which only users of the index pay
        from retrieval_index import ngrams

        self._kernels: Any = ngrams
        self._keys_from = noise_bits.keys_from
        self.capacity = capacity
        self.public: Store = ngrams.store_for(max(sum(map(len, public)), 1))
        for text in public:
            self.public = ngrams.with_text(self.public, text, _NO_BOUND)
        self.memories: Memories[Store] = Memories(capacity)
        self._nothing: Store = ngrams.store_for(1)
        self.weights = np.zeros((ngrams.COMPONENTS, ngrams.BUCKETS, 2))
        self.weights[..., 0] = 0.5
        self._requests: dict[int, _Request] = {}
        self.saved = saved
        for owner, answer in [] if saved is None else saved.latest(capacity):
            self._remember(owner, answer)

    def start(self, request: int, prompt: Sequence[int], owner: str | None = "") -> None:
        """Index a prompt. Nothing is learned from it. owner: whose answers it may be drafted from, and who may be
        drafted for from its answer; None: nobody in both cases.
        """
        self._requests[request] = _Request(self._kernels.store_for(len(prompt) + 512), owner, len(prompt))
        self._append(self._requests[request], np.asarray(prompt, np.int32), learn=False)

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
        """Return the likeliest continuations of text and `continuation`, at most `budget` nodes, root included.
        sampling: how the target draws; the noise of that draw is known, so it ranks the continuations too.
        """
        own, memory = self._requests[request].own, self._memory(self._requests[request])
        noise = _NO_NOISE
        if not sampling.greedy:
            position = int(own.state[self._kernels.END]) + len(continuation)
            noise = self._keys_from(sampling.seed, position, depth)
        tree, confidence = np.empty((2, budget), np.int32), np.empty(budget, np.float32)
        asked = np.asarray(continuation, np.int32) if continuation else _NOTHING
        n = self._kernels.draft(
            *(*own, *memory, *self.public, self.weights, asked, depth, 1e-4),
            *(noise, min(sampling.temperature, 1.0), tree, confidence),
        )
        return TokenTree(tree[0, :n], tree[1, :n], confidence[:n], np.zeros(n, np.uint32))

    def finish(self, request: int) -> None:
        """Forget the request; its answer goes to its owner's memory."""
        ended, k = self._requests.pop(request), self._kernels
        if ended.owner is None or not self.capacity:
            return
        answer = k.parts(*ended.own)[2][max(ended.prompt - CONTEXT, 0) : ended.own.state[k.END]]
        self._remember(ended.owner, answer)
        if self.saved is not None:
            self.saved.keep(ended.owner, answer)

    def _remember(self, owner: str, answer: NDArray[np.int32]) -> None:
        k, known = self._kernels, self.memories.of(owner)
        memory = k.store_for(1) if known is None else known
        memory = k.with_text(memory, np.append(answer, np.int32(k.SEPARATOR)), self.capacity)
        self.memories.keep(owner, memory, k.length(memory))

    def cached_tokens(self, owner: str | None = "") -> int:
        """Return the number of tokens in the owner's memory, separators included."""
        memory = self.memories.of(owner)
        return 0 if memory is None else int(self._kernels.length(memory))

    def _memory(self, request: _Request) -> Store:
        memory = self.memories.of(request.owner)
        return self._nothing if memory is None else memory

    def _append(self, request: _Request, tokens: NDArray[np.int32], learn: bool) -> None:
        done, memory = 0, self._memory(request)
        while done < len(tokens):
            own = request.own
            done += self._kernels.append(*own, *memory, *self.public, self.weights, tokens[done:], learn)
            if done < len(tokens):
                request.own = self._kernels.grown(own)


_NOTHING, _NO_NOISE = np.empty(0, np.int32), np.empty(0, np.uint64)
_NO_BOUND = 1 << 62
