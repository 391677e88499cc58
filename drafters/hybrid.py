"""The hybrid drafter: what a draft model predicts and what retrieval remembers, in one confidence-gated tree.

The growth policy asks for the candidates after a node. Here they are those of the head and those of the retrieval tree
at the same place, so a token that both propose is one node, the head drafts on below retrieved nodes, and the gate and
the budget see the union. Where the head is no longer worth its time, retrieval continues alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from drafters.base import BetweenSteps, Drafter, Learned, Verdict, Wanted
from drafters.growth import Frontier, Sketch
from drafters.head_drafter import HeadDrafter
from drafters.merge import Merge
from drafters.outcomes import Following
from drafters.retrieval_advice import RetrievalAdvice, followings
from engine.config import Config
from engine.sampling import SamplingParams
from engine.tree import TokenTree

_SLOWLY = 0.01  # weight of the latest observation of a chance
_LONG = 64  # positions of the text that take the head longer to read than a step
_HOPED = 0.6
_FORGETTING = 0.005  # per round without the head, so that it is tried again
_NUDGE = 1.05  # factor by which one measurement moves the time of a draft step


class HybridDrafter(Drafter):
    """head: drafts with a model. memories: the retrieval drafters whose trees are merged in."""

    calibrated = True

    def __init__(self, head: HeadDrafter, memories: Sequence[Drafter]):
        self.head, self.memories = head, memories
        self.feature_layers, self.together = head.feature_layers, head.together
        self.successors = max((memory.successors for memory in memories), default=0)
        self.merge = Merge()
        self._rescue = _HOPED  # chance that the head's nodes are accepted where retrieval misses the next token
        self.rests = bool(self.memories)
        self._resting = False  # retrieval drafts alone for now
        self._step_s = 0.001  # the time of a draft step, overhead included
        self._token_s = 0.01  # what a token is worth, by the verifier's cost model
        self._retrieved: dict[int, dict[tuple[int, ...], TokenTree]] = {}  # per request, by continuation
        self._unlearned: list[tuple[TokenTree, list[Following], list[int]]] = []
        self._unread: list[tuple[int, Verdict]] = []  # by the head

    @classmethod
    def from_config(cls, config: Config) -> HybridDrafter:
        from drafters.registry import build

        head = build(config.model_copy(update={"method": config.drafter.head}))
        assert isinstance(head, HeadDrafter)
        return cls(head, [build(config.model_copy(update={"method": name})) for name in config.drafter.memories])

    @property
    def forward_s(self) -> float:  # type: ignore[override]
        return self.head.forward_s

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._retrieved[request] = {}
        for drafter in (*self.memories, self.head):
            drafter.start(request, prompt, sampling)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return self.propose_many([(request, continuation)])[0]

    def propose_many(self, wanted: Sequence[Wanted], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        if not self._resting:
            self._catch_up()
        trees = [self._retrieve(request, continuation) for request, continuation in wanted]
        for (request, continuation), tree in zip(wanted, trees, strict=True):
            self._retrieved[request][tuple(continuation)] = tree
        if self._resting:
            return trees
        needed = self._step_s / self._token_s / max(1, len({request for request, _ in wanted}))
        advice = [RetrievalAdvice(self.merge, tree, needed, self._rescue) for tree in trees]
        surplus = [one.surplus(_root_of(tree)) for one, tree in zip(advice, trees, strict=True)]
        drafting = [row for row, gain in enumerate(surplus) if gain > 0]

        def so_far(grown: Callable[[], dict[int, TokenTree]]) -> None:
            assert between_steps is not None
            between_steps(lambda: dict(enumerate(trees)) | {drafting[i]: tree for i, tree in grown().items()})

        if drafting:
            reads = sum(self.head.behind(request) for request in {wanted[row][0] for row in drafting}) > _LONG
            started, steps = time.perf_counter(), self.head.steps
            grown = self.head.propose_many(
                [wanted[row] for row in drafting], between_steps and so_far, [advice[row] for row in drafting]
            )
            if (taken := self.head.steps - steps) and not reads:
                self._time_steps((time.perf_counter() - started) / taken)
            for row, tree in zip(drafting, grown, strict=True):
                if len(tree) > 1:
                    trees[row] = _with_sources(tree, trees[row], self.head.source)
        return trees

    def _time_steps(self, seconds: float) -> None:
        """Update the estimated step time. Each measurement moves it by a fixed factor, so it follows the median."""
        self._step_s *= _NUDGE if seconds > self._step_s else 1 / _NUDGE

    def following(self, wanted: Sequence[Wanted]) -> list[Following]:
        self._catch_up()
        read = [row for row, (request, _) in enumerate(wanted) if self._has_read(request)]
        seen = dict(zip(read, self.head.following([wanted[row] for row in read]), strict=True))
        return [
            self.merge.following(model if model[0] else None, followings(self._retrieve(request, continuation))[0])
            for row, (request, continuation) in enumerate(wanted)
            for model in [seen.get(row, ([], []))]
        ]

    def _has_read(self, request: int) -> bool:
        """Whether the head can say what may follow the text, without reading much of it first."""
        return not self._resting and (not self.memories or self.head.behind(request) <= _LONG)

    def observe(self, request: int, verdict: Verdict) -> None:
        self.settle()
        known, tokens = self._retrieved[request], verdict.tokens
        if not self._resting:  # retrieval's own calibration covers what it drafts alone
            retrieved = known[()] if () in known else self._retrieve(request, ())
            self._unlearned.append((retrieved, self.head.seen(request, tokens[:-1]), tokens))
        self._retrieved[request] = {(): known[ahead]} if (ahead := tuple(tokens)) in known else {}
        self._resting, self._token_s = verdict.rest and self.rests, verdict.token_s
        for memory in self.memories:
            memory.observe(request, verdict)
        self._unread.append((request, verdict))

    def settle(self) -> None:
        self._catch_up()
        for retrieved, seen, tokens in self._unlearned:
            self._learn(retrieved, seen, tokens)
        self._unlearned.clear()

    def _catch_up(self) -> None:
        """Pass the head the verdicts it has not seen: a tree drafted without it need not wait for this."""
        while self._unread:
            self.head.observe(*self._unread.pop(0))

    def finish(self, request: int) -> None:
        self._catch_up()
        self._retrieved.pop(request, None)
        for drafter in (*self.memories, self.head):
            drafter.finish(request)

    def learned(self) -> Learned:
        ours = {"hybrid": self.merge.calibrator.cells(), "hybrid.rescue": np.array([self._rescue])}
        for drafter in (*self.memories, self.head):
            ours |= drafter.learned()
        return ours

    def recall(self, learned: Learned) -> None:
        if "hybrid" in learned:
            self.merge.calibrator.recall(learned["hybrid"])
            self._rescue = float(learned["hybrid.rescue"].item())
        for drafter in (*self.memories, self.head):
            drafter.recall(learned)

    def _retrieve(self, request: int, continuation: Sequence[int]) -> TokenTree:
        if not self.memories:
            return TokenTree.root_only(continuation[-1] if continuation else self.head.last_token(request))
        trees = (memory.propose(request, continuation).marked(memory.source) for memory in self.memories)
        return reduce(TokenTree.union, trees)

    def _learn(self, retrieved: TokenTree, seen: list[Following], tokens: list[int]) -> None:
        """Learn from a verdict about every candidate along the accepted path, the head's (`seen`) and retrieval's."""
        behind, place = followings(retrieved), 0
        for depth, token in enumerate(tokens):
            model, memory = seen[depth] if depth < len(seen) else None, behind[place]
            for candidate, p, q in self.merge.candidates(model, memory):
                self.merge.learn(p, q, candidate == token)
            if model is not None and token not in memory[0]:
                is_accepted = depth + 1 < len(tokens)
                self._rescue += _SLOWLY * (is_accepted - self._rescue)
            elif model is None and depth == 0:
                self._rescue += _FORGETTING * (_HOPED - self._rescue)
            following = retrieved.child(place, token)
            if following is None:
                break
            place = following


def _root_of(tree: TokenTree) -> Frontier:
    return Sketch([int(tree.tokens[0])]).frontier([0])


def _with_sources(tree: TokenTree, retrieved: TokenTree, head: int) -> TokenTree:
    """The tree with each node's source marked: retrieval where it has the node, the head for all others."""
    source = np.full(len(tree), head, np.uint32)
    place: list[int | None] = [0] * len(tree)
    source[0] = 0
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if node:
            above = place[parent]
            place[node] = found = None if above is None else retrieved.child(above, token)
            if found is not None:
                source[node] = retrieved.source[found]
    return TokenTree(tree.tokens, tree.parents, tree.confidence, source)
