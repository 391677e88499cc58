"""The hybrid drafter: what a draft model predicts and what retrieval remembers, in one confidence-gated tree.

The growth policy asks for the candidates after a node. Here they are those of the head and those of the retrieval tree
at the same place, so a token that both propose is one node, the head drafts on below retrieved nodes, and the gate and
the budget see the union. Where the verifier lets the head rest, retrieval continues alone. Without retrieval it
is the head alone, with chances learned from verdicts, and drafting only where it pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf
from typing import NamedTuple

import numpy as np

from drafters.heads.head_drafter import HeadDrafter
from drafters.hybrid.merge import Merge
from drafters.hybrid.rescues import Gains, Rescues
from drafters.hybrid.retrieval_advice import RetrievalAdvice, followings
from engine.config import Config
from engine.core.drafter_protocol import BetweenSteps, DeviceVerdicts, Drafter, OnItsWay, Verdict
from engine.core.outcomes import DraftQuery, Following
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.costs.constants import LONG_READING, NEXT_TO_NOTHING

_NUDGE = 1.05  # factor by which one measurement moves the time of a draft step


class KnownDraft(NamedTuple):
    """What was drafted for an outcome. retrieved: retrieval's tree. head_drafted: whether the head drafted too;
    expected_misses: next tokens that retrieval was then expected to miss.
    """

    retrieved: TokenTree
    head_drafted: bool = False
    expected_misses: float = 0.0


class Unlearned(NamedTuple):
    """A verdict that the merge has not learned from yet. `retrieved` is retrieval's tree for the round; `seen` holds
    the head's predictions along `tokens`.
    """

    retrieved: TokenTree
    seen: list[Following]
    tokens: list[int]


class HybridDrafter(Drafter):
    """Merges a draft model and retrieval in one tree. head: drafts with a model. memories: the retrieval drafters whose
    trees are merged in. budget: maximum nodes of a tree.
    """

    calibrated = rests = True

    def __init__(self, head: HeadDrafter, memories: Sequence[Drafter], budget: int):
        self.head, self.memories, self.budget = head, memories, budget
        self.source = head.source
        self.feature_layers, self.together = head.feature_layers, head.together
        self.successors = max((memory.successors for memory in memories), default=0)
        self.merge = Merge()
        self.draft_s, self.read_s = head.draft_s, head.read_s
        self._gains, self._rescues = Gains(), Rescues()
        self._resting: set[int] = set()  # requests for which retrieval drafts alone for now
        self._step_s = head.step_s  # the time from one of the head's forwards to the next
        self._token_s, self._row_tokens = 0.01, 0.0  # what a token and a row are worth, by the verifier's cost model
        self._known: dict[int, dict[tuple[int, ...], KnownDraft]] = {}  # per request, by continuation
        self._unlearned: list[Unlearned] = []
        self._pending_verdicts: list[tuple[int, Verdict]] = []  # by the head

    @classmethod
    def of_parts(cls, parts: Sequence[Drafter], config: Config) -> HybridDrafter:
        """Join the parts. parts: the drafters of the methods that `drafters.parts` names, in its order."""
        head, *memories = parts
        assert isinstance(head, HeadDrafter)
        return cls(head, memories, config.drafter.budget)

    @property
    def forward_s(self) -> float:  # type: ignore[override]
        return self.head.forward_s

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._known[request] = {}
        self._rescues.start(request)
        for drafter in (*self.memories, self.head):
            drafter.start(request, prompt, sampling)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return self.propose_many([DraftQuery(request, continuation)])[0]

    def propose_many(self, queries: Sequence[DraftQuery], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        awake = [row for row, (request, _) in enumerate(queries) if request not in self._resting]
        if awake or not self.memories:
            self._catch_up()
        retrieved = [self._retrieve(request, continuation) for request, continuation in queries]
        advice = self._advice(queries, retrieved)
        drafting = [row for row in awake if advice[row].begins()]

        def so_far(grown: Callable[[], dict[int, TokenTree]]) -> None:
            assert between_steps is not None
            between_steps(lambda: self._so_far(retrieved, {drafting[i]: tree for i, tree in grown().items()}))

        trees = retrieved
        if drafting:
            unread = sum(self.head.count_unread(request) for request in {queries[row][0] for row in drafting})
            started, steps = time.perf_counter(), self.head.steps
            grown = self.head.propose_many(
                [queries[row] for row in drafting], between_steps and so_far, [advice[row] for row in drafting]
            )
            if (taken := self.head.steps - steps) and unread <= LONG_READING:
                self._time_steps((time.perf_counter() - started) / taken)
            trees = self._merged(
                retrieved, {row: tree for row, tree in zip(drafting, grown, strict=True) if len(tree) > 1}
            )
        for row, (request, continuation) in enumerate(queries):
            self._known[request][tuple(continuation)] = KnownDraft(
                retrieved[row], row in drafting, advice[row].expected_misses
            )
        return trees

    def draft_behind(self, trees: Mapping[int, int], verdicts: DeviceVerdicts) -> OnItsWay | None:
        """The head alone drafts behind a round; retrieval's nodes are merged once the host knows what it came to."""
        sent: OnItsWay | None = None if self._pending_verdicts else self.head.draft_behind(trees, verdicts)
        return sent

    def _advice(self, queries: Sequence[DraftQuery], trees: Sequence[TokenTree]) -> list[RetrievalAdvice]:
        """Return retrieval's part in the growth of each tree. The requests share the time of the head's forwards.

        Whether the head drafts is the verifier's choice, which the head follows where retrieval has next to nothing.
        """
        needed = self._step_s / self._token_s / max(1, len({request for request, _ in queries}))
        advice = []
        for (request, _), tree in zip(queries, trees, strict=True):
            expected = expected_of(tree)
            gain = self._gains.expected(expected) if expected > NEXT_TO_NOTHING else inf
            rescue = max(self._rescues.expected(request), 2 * needed)
            advice.append(RetrievalAdvice(self.merge, tree, needed, gain, rescue, self.head.one_pass))
        return advice

    def _so_far(self, retrieved: Sequence[TokenTree], grown: dict[int, TokenTree]) -> dict[int, TokenTree]:
        """Return the trees under way where they already hold more than retrieval's, elsewhere retrieval's."""
        more = {row: tree for row, tree in grown.items() if expected_of(tree) > expected_of(retrieved[row])}
        return dict(enumerate(self._merged(retrieved, more)))

    def _merged(self, retrieved: Sequence[TokenTree], grown: dict[int, TokenTree]) -> list[TokenTree]:
        """Return the grown trees, and retrieval's where there is none, with their sources."""
        source, row_tokens = self.head.source, self._row_tokens
        return [
            with_sources(grown.get(row, tree), tree, source, row_tokens).prune(self.budget)
            for row, tree in enumerate(retrieved)
        ]

    def _time_steps(self, seconds: float) -> None:
        """Update the estimated step time. Each measurement moves it by a fixed factor, so it follows the median."""
        self._step_s *= _NUDGE if seconds > self._step_s else 1 / _NUDGE

    def following(self, queries: Sequence[DraftQuery]) -> list[Following]:
        self._catch_up()
        read = [row for row, (request, _) in enumerate(queries) if self._has_read(request)]
        seen = dict(zip(read, self.head.following([queries[row] for row in read]), strict=True))
        return [
            self.merge.following(model if model[0] else None, followings(self._retrieve(request, continuation))[0])
            for row, (request, continuation) in enumerate(queries)
            for model in [seen.get(row, ([], []))]
        ]

    def _has_read(self, request: int) -> bool:
        """Return whether the head can say what may follow the text without first reading much of it."""
        return request not in self._resting and (not self.memories or self.head.count_unread(request) <= LONG_READING)

    def observe(self, request: int, verdict: Verdict) -> None:
        self.settle()
        known, tokens = self._known[request], verdict.tokens
        if request not in self._resting:  # retrieval's own calibration covers what it drafts alone
            now = known[()] if () in known else KnownDraft(self._retrieve(request, ()))
            self._unlearned.append(Unlearned(now.retrieved, self.head.seen(request, tokens[:-1]), tokens))
            if now.head_drafted and len(verdict.tree) > 1:  # the root alone may have been verified instead
                gained = int(np.count_nonzero(verdict.tree.source[verdict.path] & self.head.source))
                self._rescues.observe(request, gained, now.expected_misses)
                self._gains.observe(expected_of(now.retrieved), gained)
        self._known[request] = {(): known[ahead]} if (ahead := tuple(tokens)) in known else {}
        self._token_s, self._row_tokens = verdict.token_s, verdict.row_tokens or 0.0
        (self._resting.add if verdict.rest else self._resting.discard)(request)
        for memory in self.memories:
            memory.observe(request, verdict)
        self._pending_verdicts.append((request, verdict))

    def settle(self) -> None:
        self._catch_up()
        for verdict in self._unlearned:
            self._learn(verdict)
        self._unlearned.clear()

    def _catch_up(self) -> None:
        """Pass the head the verdicts it has not seen: a tree drafted without it need not wait for this."""
        while self._pending_verdicts:
            self.head.observe(*self._pending_verdicts.pop(0))

    def finish(self, request: int) -> None:
        self._pending_verdicts = [(of, verdict) for of, verdict in self._pending_verdicts if of != request]
        self._resting.discard(request)
        self._known.pop(request, None)
        self._rescues.finish(request)
        for drafter in (*self.memories, self.head):
            drafter.finish(request)

    def close(self) -> None:
        for drafter in (*self.memories, self.head):
            drafter.close()

    def _retrieve(self, request: int, continuation: Sequence[int]) -> TokenTree:
        if not self.memories:
            return TokenTree.root_only(continuation[-1] if continuation else self.head.last_token(request))
        trees = (memory.propose(request, continuation).marked(memory.source) for memory in self.memories)
        return reduce(TokenTree.union, trees).prune(self.budget)

    def _learn(self, verdict: Unlearned) -> None:
        """Learn about every candidate along the accepted path, the head's and retrieval's."""
        predicted, place = followings(verdict.retrieved), 0
        for depth, token in enumerate(verdict.tokens):
            model = verdict.seen[depth] if depth < len(verdict.seen) else None
            for candidate, p, q in self.merge.candidates(model, predicted[place]):
                self.merge.learn(p, q, candidate == token)
            child = verdict.retrieved.child(place, token)
            if child is None:
                break
            place = child


def expected_of(tree: TokenTree) -> float:
    """Return how many tokens of a tree are expected to be accepted."""
    return float(tree.confidence[1:].sum())


def with_sources(tree: TokenTree, retrieved: TokenTree, head: int, row_tokens: float) -> TokenTree:
    """Return the tree with each node's sources marked: retrieval where it has the node, and the head where retrieval
    alone would not have had it verified, since it has no such node or one that is not worth its row. row_tokens: what
    that costs. Nodes that retrieval alone would have had verified and the tree lacks are added with confidence 0: they
    tell the verifier what the head has saved.
    """
    tokens, parents, confidence = tree.tokens.tolist(), tree.parents.tolist(), tree.confidence.tolist()
    is_worth = (retrieved.confidence >= row_tokens).tolist()
    source, place = [0], {0: 0}  # place: node of `retrieved` -> node of the tree
    above: list[int | None] = [0]  # node of the tree -> node of `retrieved`
    for node in range(1, len(tree)):
        parent = above[parents[node]]
        found = None if parent is None else retrieved.child(parent, tokens[node])
        above.append(found)
        if found is None:
            source.append(head)
        else:
            place[found] = node
            source.append(int(retrieved.source[found]) | (0 if is_worth[found] else head))
    for node in range(1, len(retrieved)):
        if is_worth[node] and node not in place:
            place[node] = len(tokens)
            tokens.append(int(retrieved.tokens[node]))
            parents.append(place[int(retrieved.parents[node])])
            confidence.append(0.0)
            source.append(int(retrieved.source[node]))
    arrays = np.asarray(tokens, np.int32), np.asarray(parents, np.int32), np.asarray(confidence, np.float32)
    return TokenTree(*arrays, np.asarray(source, np.uint32))
