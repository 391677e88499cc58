"""The drafter worker: owns the drafter, hears every verdict, and has the next tree ready before it is asked for.

When a verdict names the tree that the next round verifies, or once it has sent one, the worker ranks that round's
outcomes and drafts for the likeliest, a few at a time, each sent as soon as it is there. What has arrived is read
before anything is drafted, so that no draft is made for an outcome already overtaken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from drafters.base import Drafter
from drafters.base import Verdict as Observed
from drafters.outcomes import likeliest
from engine.messages import Array, Draft, Finish, Heartbeat, Hello, Ready, Start, Stop, Verdict
from engine.trace import Trace
from engine.transport import Line
from engine.tree import TokenTree

FROM_VERIFIER = (Start, Verdict, Finish)
FROM_FRONT_END = (Stop,)
HEARTBEAT_S = 0.5
OUTCOMES = 24  # drafted for in one round at most
BATCH = 4  # of them in the same forwards: more take longer until the first is there and a verdict is heard

Outcome = tuple[int, int, int]
"""(draft, node, token), as a `Draft` names it."""


class _Request:
    """round: the one under way. under: the draft it verifies, 0 if that is not ours (yet).

    sent: what may be verified, or what is. wanted: the outcome to draft for now. guesses: those to draft ahead.
    """

    def __init__(self, round_: int, last_token: int):
        self.round, self.last_token = round_, last_token
        self.sent: dict[int, tuple[Outcome, TokenTree]] = {}
        self.drafts = 0
        self.under = 0
        self.ahead = False
        self.wanted: Outcome | None = None
        self.guesses: deque[tuple[int, int]] | None = None

    def number_of(self, outcome: Outcome) -> int:
        """The draft that was sent for `outcome`, 0 if none was."""
        return next((number for number, (known, _) in self.sent.items() if known == outcome), 0)


class DrafterWorker:
    """control: the line to the front end; verdicts: the line to the verifier."""

    def __init__(self, drafter: Drafter, control: Line, verdicts: Line, traced: bool = False):
        self.drafter, self.control, self.verdicts = drafter, control, verdicts
        self.trace = Trace(control, traced)
        self.requests: dict[int, _Request] = {}
        self.heard_ns = 0
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        wants = self.drafter
        hello = Hello(feature_layers=wants.feature_layers, successors=wants.successors, calibrated=wants.calibrated)
        self.verdicts.send(hello)
        self.control.send(Ready())
        poller = zmq.Poller()
        poller.register(self.control.socket, zmq.POLLIN)
        poller.register(self.verdicts.socket, zmq.POLLIN)
        while not self.stopping:
            busy = any(self._has_work(request) for request in self.requests.values())
            poller.poll(0 if busy else int(HEARTBEAT_S * 1000))
            for _ in self.control.received():
                self.stopping = True
            for message, arrays in self.verdicts.received():
                self._hear(message, arrays)
            self._work()
            self._beat()
        self.trace.flush()

    def _has_work(self, request: _Request) -> bool:
        unranked = request.guesses is None and request.under in request.sent
        return request.wanted is not None or (request.ahead and (unranked or bool(request.guesses)))

    def _work(self) -> None:
        """The trees that are waited for; if there are none, one batch of those that may be."""
        waited_for = [(number, request) for number, request in self.requests.items() if request.wanted is not None]
        for number, request in waited_for:
            self._draft(number, request)
        if not waited_for:
            for number, request in self.requests.items():
                if self._has_work(request):
                    self._draft_ahead(number, request)
                    self.requests[number] = self.requests.pop(number)  # the others' turn next
                    break

    # What arrives.

    def _hear(self, message: Any, arrays: list[Array]) -> None:
        if isinstance(message, Start):
            text = arrays[0].tolist()
            request = self.requests[message.request] = _Request(message.round, text[-1])
            self.drafter.start(message.request, text, message.sampling)
            if message.round:
                request.wanted = (0, 0, text[-1])
        elif isinstance(message, Finish):
            if self.requests.pop(message.request, None) is not None:
                self.drafter.finish(message.request)
        elif (known := self.requests.get(message.request)) is not None:
            self._observe(message, arrays, known)

    def _observe(self, message: Verdict, arrays: list[Array], request: _Request) -> None:
        started = time.perf_counter_ns()
        path, tokens = arrays[0].tolist(), arrays[1].tolist()
        tree = request.sent[message.draft][1] if message.draft in request.sent else None
        tree = tree or TokenTree.root_only(request.last_token)
        features = arrays[2] if arrays[2].size else None
        successors = arrays[3] if len(arrays[3]) == len(tree) else None
        self.drafter.observe(message.request, Observed(tree, path, tokens, features, successors))
        outcome = (message.draft, path[-1], tokens[-1])
        request.round, request.last_token, request.ahead = message.round + 1, tokens[-1], message.ahead
        request.under = request.number_of(outcome)
        request.sent = {request.under: request.sent[request.under]} if request.under else {}
        request.wanted = None if request.under else outcome
        request.guesses = None
        self.trace.span("sync" if request.under else "sync (miss)", started, message.request)

    # What is drafted.

    def _draft(self, number: int, request: _Request) -> None:
        """The tree that the verifier waits for."""
        assert request.wanted is not None
        started = time.perf_counter_ns()
        before_s = self.drafter.forward_s
        tree = self.drafter.propose(number)
        request.under = self._send(number, request, request.round, request.wanted, tree, before_s)
        request.wanted = None
        self.trace.span("draft", started, number, f"{len(tree)} nodes")

    def _draft_ahead(self, number: int, request: _Request) -> None:
        """Trees for the next few of the likeliest outcomes of the round under way."""
        started = time.perf_counter_ns()
        tree = request.sent[request.under][1]
        if request.guesses is None:

            def following(paths: Sequence[Sequence[int]]) -> Any:
                return self.drafter.following(number, paths)

            request.guesses = deque((o.node, o.token) for o in likeliest(tree, following, OUTCOMES))
        before_s = self.drafter.forward_s
        batch = [request.guesses.popleft() for _ in range(min(BATCH, len(request.guesses)))]
        trees = self.drafter.propose_many(number, [[*tree.path_tokens(node)[1:], token] for node, token in batch])
        for (node, token), ahead in zip(batch, trees, strict=True):
            self._send(number, request, request.round + 1, (request.under, node, token), ahead, before_s)
            before_s = self.drafter.forward_s  # the batch's time is counted once
        self.trace.span("draft ahead", started, number, f"{len(batch)} outcomes")

    def _send(
        self, number: int, request: _Request, round_: int, outcome: Outcome, tree: TokenTree, since_s: float
    ) -> int:
        request.drafts += 1
        request.sent[request.drafts] = (outcome, tree)
        parent, node, token = outcome
        draft = Draft(
            request=number,
            round=round_,
            draft=request.drafts,
            parent=parent,
            node=node,
            token=token,
            draft_us=int((self.drafter.forward_s - since_s) * 1e6),
        )
        self.verdicts.send(draft, [tree.tokens, tree.parents, tree.confidence, tree.source])
        return request.drafts

    def _beat(self) -> None:
        now = time.perf_counter_ns()
        if now - self.heard_ns > HEARTBEAT_S * 1e9:
            self.heard_ns = now
            self.control.send(Heartbeat())
            self.trace.flush()
