"""The verifier's link to its drafter: who drafts, what it asks for, what it has sent and what is sent to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import Config
from engine.core.errors import ProtocolError
from engine.core.hidden_states import NO_STATES, States
from engine.core.methods import METHODS
from engine.core.tree import TokenTree
from engine.costs.bandit import Experience
from engine.costs.cost_model import CostModel
from engine.costs.draft_choice import DraftKinds
from engine.model.target import Target
from engine.verifier.request import Request
from engine.verifier.scheduler import Scheduler
from engine.verifier.step import Step, StepResult
from engine.wire.aside import OnDevice
from engine.wire.loop_link import LoopRouter
from engine.wire.messages import Array, Draft, Finish, Hello, Message, Rejoin, RoundVerdict, Start
from engine.wire.transport import Router

FROM_DRAFTER = (Hello, Draft)


class DrafterLink:
    """The verifier's end of its link to drafters.

    router: drafters connect to it. peer: the drafter that sent the latest Hello, which drafts; None if there is none.
    kinds: what its drafts have gained. A drafter that owes a draft for longer than the configuration's draft_timeout_s
    is late, until its next message.

    The router bounds what a drafter leaves unread. A drafter to which no more can be sent is dropped, as if it were
    gone; once it reads again it is asked to rejoin, as after a restart.
    """

    def __init__(
        self,
        router: Router | LoopRouter,
        target: Target,
        scheduler: Scheduler,
        config: Config,
    ):
        self.router, self.target, self.scheduler = router, target, scheduler
        self.budget, self.timeout_s = config.drafter.budget, config.verifier.draft_timeout_s
        self.method, self.weighed = METHODS[config.method], config.verifier.cut
        self.kinds = DraftKinds()
        self.peer: str | None = None
        self.wants = Hello()
        self._late = False
        self._dropped: str | None = None  # to be asked to rejoin
        self._newcomers: list[tuple[str, Hello]] = []  # drafters to welcome between rounds

    @property
    def present(self) -> bool:
        """Whether there is a drafter to wait for."""
        if self.peer is not None and not self._late:
            running = (r for r in self.scheduler.running if r.wants_draft and r.has_answer)
            waiting = (r for r in running if not (r.reading or r.has_draft))
            oldest = min((request.waiting_since_ns for request in waiting), default=None)
            self._late = oldest is not None and time.perf_counter_ns() - oldest > self.timeout_s * 1e9
        return self.peer is not None and not self._late

    # What arrives.

    def receive(self) -> None:
        """Process what has arrived between rounds: file drafts, welcome drafters."""
        self.poll()
        for peer, hello in self._newcomers:
            self._welcome(peer, hello)
        self._newcomers.clear()
        if self._dropped is not None and self.router.send(self._dropped, Rejoin()):
            self._dropped = None

    def poll(self) -> None:
        """File the drafts that have arrived; may be called while a round is under way."""
        for peer, message, arrays in self.router.received():
            if isinstance(message, Hello):
                self._newcomers.append((peer, message))
            elif peer == self.peer:
                self._late = False
                self._keep(message, arrays)

    def _welcome(self, peer: str, hello: Hello) -> None:
        """Welcome a drafter that joins: it learns of every request, and drafts from the text so far."""
        most = self.target.layers + self.target.key_pieces
        layers_exist = all(0 <= layer <= most for layer in hello.feature_layers)
        if not (layers_exist and 0 <= hello.successors <= self.target.vocab_size):
            self.router.malformed += 1
            return
        if hello.feature_layers != self.wants.feature_layers:
            self._forget_hidden_states(hello.feature_layers)
            self.target.capture(hello.feature_layers)
        self.peer, self._late, self._dropped, self.wants = peer, False, None, hello
        self.kinds = self._kinds_of(hello)
        self.scheduler.needs_hidden_states = bool(hello.feature_layers)
        for request in self.scheduler:
            request.join_drafter()
            self.introduce(request)

    def _kinds_of(self, hello: Hello) -> DraftKinds:
        """Return the kinds of drafts that must pay for their cost."""
        if not self.weighed:
            return DraftKinds()
        model = Experience(hello.draft_s, hello.read_s) if self.method.has_model and hello.rests else None
        retrieves = self.method.merges or not self.method.has_model
        return DraftKinds(Experience() if retrieves else None, model)

    def _forget_hidden_states(self, layers: Sequence[int]) -> None:
        """Forget the hidden states that are kept: they are of other layers than these, which the new drafter wants."""
        if self.target.pool is not None:
            self.target.pool.forget_hidden_states(layers)
        for request in self.scheduler:
            request.forget_hidden_states()

    def _keep(self, message: Draft, arrays: list[Array]) -> None:
        """File a draft; those for an unknown request are dropped. Most drafts made ahead are never used, so a tree is
        validated only once its outcome has come true.
        """
        if message.draft < 1:
            self.router.malformed += 1
        elif (request := self.scheduler.find(message.request)) is not None:
            request.take_draft(message, arrays)

    def step_of(self, request: Request) -> Step:
        """Return the request's step, with its draft; with the root alone if there is none that can be verified."""
        root = TokenTree.root_only(request.text[-1])
        if (filed := request.drafts.get(request.outcome)) is None:
            return Step.of(request, root)
        draft, arrays = filed
        try:
            tree = TokenTree(*arrays).validate(self.target.vocab_size)
            if len(tree) > self.budget or tree.tokens[0] != draft.token:
                raise ProtocolError("draft is over the budget or does not continue its outcome")
        except ProtocolError:
            self.router.malformed += 1
            return Step.of(request, root)
        fits = len(request.text) + int(tree.depths.max()) <= self.target.context
        return Step.of(request, tree, draft.draft, draft.draft_us) if fits else Step.of(request, root)

    # What is sent.

    def _send(self, message: Message, arrays: Sequence[Any] = ()) -> None:
        """Send to the drafter. If it has left too much unread, it is dropped."""
        if self.peer is not None and not self.router.send(self.peer, message, arrays):
            self.peer, self._dropped = None, self.peer

    def introduce(self, request: Request) -> None:
        """Send the drafter a request and its text so far."""
        if self.peer is None or not request.wants_draft:
            return
        request.take_unsent()
        start = Start(request=request.number, round=request.next_round, sampling=request.sampling)
        self._send(start, [np.asarray(request.text)])

    def send_verdict(self, result: StepResult, costs: CostModel, requests: int) -> None:
        """Send the verdict on a round of `requests` requests, with the tokens and features of all positions not sent
        yet: a resting head gets them when it wakes.
        """
        if self.peer is None:
            return
        request = result.request
        rest = request.choice.rests
        features = NO_STATES if rest else request.features.take()
        verdict = RoundVerdict(
            request=request.number,
            round=request.round,
            draft=result.draft,
            ahead=costs.drafting_ahead,
            root_only=request.root_only,
            rest=rest,
            rates=costs.rates(requests, request.root_only),
        )
        successors = np.zeros((0, 0), np.int32) if result.successors is None else result.successors
        forced = np.asarray(result.forced_tokens, np.int32)
        missed = np.asarray(request.take_unsent(len(result.tokens)), np.int32)
        arrays = [np.asarray(result.path), np.asarray(result.tokens), successors, forced, missed]
        self._send(verdict, [*arrays, self._given(features)])

    def _given(self, features: States) -> Any:
        """Return hidden states as the drafter takes them: on a GPU another thread's stream waits for what made them."""
        apart = isinstance(features, Tensor) and isinstance(self.router, Router)
        return HandedOver(features) if apart else features

    def finish(self, request: Request) -> None:
        """End the request."""
        self._send(Finish(request=request.number))


class HandedOver(OnDevice):
    """A tensor that the verifier's thread gives to the drafter's, which works in a stream of its own. It is ready once
    what was launched before it was handed over is done.
    """

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._made: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record()

    def take(self) -> Tensor:
        """Return the tensor. On a GPU this thread's stream waits for what made it, and nobody else does; its memory is
        given to no other tensor before what this stream has launched is done.
        """
        if self._made is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._made)
            self._tensor.record_stream(stream)
        return self._tensor
