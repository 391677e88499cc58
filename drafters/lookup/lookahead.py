"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target drafts for itself by Jacobi iteration.

A window of guesses, `columns` wide and up to `ngram` - 1 levels deep, is carried along as probe nodes of the tree:
level 0 is a chain below the root, and each later level hangs below its own column, which gives every guess the position
and the attention of the published mask. The target's tokens after the last level are the next level. A column with its
next token is an n-gram, and n-grams whose first token is the root's are drafted. Probes are nodes like any other: a
right guess is accepted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import Config
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree

_PROB = 0.5  # probability of a drafted n-gram's next token, for c(v) only: the published method has none


@dataclass
class _Request:
    """One request's window and n-grams. levels: the window, level by level. pool: first token -> the n-grams' other
    tokens, newest first.
    """

    last: int
    levels: list[list[int]]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


class Lookahead(Drafter):
    """Lookahead decoding as published. columns, ngram, guesses: W, N and G, published as 15, 5 and 15: 121 nodes a
    round. With a smaller budget W and G shrink alike.
    """

    successors = 1

    def __init__(self, columns: int = 15, ngram: int = 5, guesses: int = 15, budget: int = 121):
        room = max(1, (budget - 1) // (2 * (ngram - 1)))
        self.columns, self.ngram, self.guesses = min(columns, room), ngram, min(guesses, room)
        self.budget = budget
        self.requests: dict[int, _Request] = {}

    @classmethod
    def from_config(cls, config: Config) -> Lookahead:
        return cls(budget=config.drafter.budget)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        draw = random.Random(request)  # the first guesses are words of the prompt
        self.requests[request] = _Request(prompt[-1], [[draw.choice(prompt) for _ in range(self.columns)]])

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        state = self.requests[request]
        root = continuation[-1] if continuation else state.last
        builder = _TreeBuilder(root)
        for guess in state.pool.get(root, ()):
            node, confidence = 0, 1.0
            for token in guess:
                confidence *= _PROB
                node = builder.add(node, token, confidence)
        node = 0
        for column in range(self.columns):
            node = below = builder.add(node, state.levels[0][column], 0.0)
            for level in state.levels[1:]:
                below = builder.add(below, level[column], 0.0)
        tree = TokenTree.from_lists(builder.tokens, builder.parents, builder.confidence)
        return tree if len(tree) <= self.budget else tree.keep(range(self.budget))

    def observe(self, request: int, verdict: Verdict) -> None:
        state = self.requests[request]
        state.last = verdict.tokens[-1]
        if verdict.successors is None:
            return
        new = [self._said_behind(state, verdict, column) for column in range(self.columns)]
        if None in new:
            return
        state.levels.append([token for token in new if token is not None])
        if len(state.levels) == self.ngram:
            for column in range(self.columns):
                self._remember(state, [level[column] for level in state.levels])
            del state.levels[0]

    def finish(self, request: int) -> None:
        del self.requests[request]

    def _said_behind(self, state: _Request, verdict: Verdict, column: int) -> int | None:
        """Return the target's token after a column's last guess; None if the round did not carry the window."""
        path = [*state.levels[0][: column + 1], *(level[column] for level in state.levels[1:])]
        node = 0
        for token in path:
            if (child := verdict.tree.child(node, token)) is None:
                return None
            node = child
        assert verdict.successors is not None
        token = int(verdict.successors[node, 0])
        return token if token >= 0 else None

    def _remember(self, state: _Request, ngram: list[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = state.pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.insert(0, rest)
        del known[self.guesses :]


class _TreeBuilder:
    """A tree under construction in which no two children of a node have the same token."""

    def __init__(self, root: int):
        self.tokens, self.parents, self.confidence = [root], [-1], [1.0]
        self._child: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, confidence: float) -> int:
        """Return the child of `parent` with that token; a new one gets the confidence."""
        node = self._child.get((parent, token))
        if node is None:
            node = self._child[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.confidence.append(min(confidence, self.confidence[parent]))
        return node
