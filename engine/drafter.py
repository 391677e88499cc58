"""The drafter worker: owns the drafter, hears every verdict and answers with the next tree.

All that has arrived is read before anything is drafted, so that no draft is made for an outcome already overtaken.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from drafters.base import Drafter
from drafters.base import Verdict as Observed
from engine.messages import Array, Draft, Finish, Heartbeat, Hello, Ready, Start, Stop, Verdict
from engine.transport import Line
from engine.tree import TokenTree

FROM_VERIFIER = (Start, Verdict, Finish)
FROM_FRONT_END = (Stop,)
HEARTBEAT_S = 0.5


class _Request:
    """What the worker knows of a request. wanted: (round, outcome) of the tree to draft next."""

    def __init__(self, last_token: int):
        self.last_token = last_token
        self.sent: dict[int, TokenTree] = {}
        self.drafts = 0
        self.wanted: tuple[int, tuple[int, int, int]] | None = None


class DrafterWorker:
    """control: the line to the front end; verdicts: the line to the verifier."""

    def __init__(self, drafter: Drafter, control: Line, verdicts: Line):
        self.drafter, self.control, self.verdicts = drafter, control, verdicts
        self.requests: dict[int, _Request] = {}
        self.heard_ns = 0
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        self.verdicts.send(Hello(feature_layers=self.drafter.feature_layers, successors=self.drafter.successors))
        self.control.send(Ready())
        poller = zmq.Poller()
        poller.register(self.control.socket, zmq.POLLIN)
        poller.register(self.verdicts.socket, zmq.POLLIN)
        while not self.stopping:
            poller.poll(int(HEARTBEAT_S * 1000))
            for _ in self.control.received():
                self.stopping = True
            for message, arrays in self.verdicts.received():
                self._hear(message, arrays)
            for number, request in self.requests.items():
                if request.wanted is not None:
                    self._draft(number, request)
            self._beat()

    def _hear(self, message: Any, arrays: list[Array]) -> None:
        if isinstance(message, Start):
            text = arrays[0].tolist()
            request = self.requests[message.request] = _Request(text[-1])
            self.drafter.start(message.request, text, message.sampling)
            if message.round:
                request.wanted = (message.round, (0, 0, text[-1]))
        elif isinstance(message, Finish):
            if self.requests.pop(message.request, None) is not None:
                self.drafter.finish(message.request)
        elif (known := self.requests.get(message.request)) is not None:
            self._observe(message, arrays, known)

    def _observe(self, message: Verdict, arrays: list[Array], request: _Request) -> None:
        path, tokens = arrays[0].tolist(), arrays[1].tolist()
        tree = request.sent.get(message.draft) or TokenTree.root_only(request.last_token)
        features = arrays[2] if arrays[2].size else None
        successors = arrays[3] if len(arrays[3]) == len(tree) else None
        self.drafter.observe(message.request, Observed(tree, path, tokens, features, successors))
        request.last_token = tokens[-1]
        request.sent = {number: tree for number, tree in request.sent.items() if number == message.following}
        request.wanted = (message.round + 1, (message.draft, path[-1], tokens[-1]))

    def _draft(self, number: int, request: _Request) -> None:
        assert request.wanted is not None
        round_, (parent, node, token) = request.wanted
        request.wanted = None
        before_s = self.drafter.forward_s
        tree = self.drafter.propose(number)
        draft_us = int((self.drafter.forward_s - before_s) * 1e6)
        request.drafts += 1
        request.sent[request.drafts] = tree
        self.verdicts.send(
            Draft(
                request=number,
                round=round_,
                draft=request.drafts,
                parent=parent,
                node=node,
                token=token,
                draft_us=draft_us,
            ),
            [tree.tokens, tree.parents, tree.confidence, tree.source],
        )

    def _beat(self) -> None:
        now = time.perf_counter_ns()
        if now - self.heard_ns > HEARTBEAT_S * 1e9:
            self.heard_ns = now
            self.control.send(Heartbeat())
