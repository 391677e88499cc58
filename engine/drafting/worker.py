"""The drafter worker: owns the drafter, receives every verdict, and has the next tree ready before it is needed.

Once the tree of the next round is known (named by a verdict, or just sent), the worker ranks that round's outcomes and
drafts for the likeliest, a few at a time, and sends each draft as soon as it is ready. Messages are read before
anything is drafted, so that no draft is made for an outcome already overtaken.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from engine.core.drafter_protocol import DeviceVerdicts, Drafter, OnItsWay, Verdict
from engine.core.errors import ProtocolError
from engine.core.outcomes import DraftKey, DraftQuery, Outcome, likeliest
from engine.core.tree import TokenTree
from engine.costs.constants import ENOUGH_TOKENS, GRAFT_PROB, LEAST_OUTCOME, OUTCOMES
from engine.drafting.states import DraftedRequest, Running, Sent, WantedDraft
from engine.wire.loop_link import LoopDealer
from engine.wire.messages import (
    HEARTBEAT_S,
    Array,
    Draft,
    Finish,
    Heartbeat,
    Hello,
    Rates,
    Ready,
    Rejoin,
    RoundVerdict,
    Start,
    Stop,
)
from engine.wire.trace import Trace
from engine.wire.transport import Dealer

FROM_VERIFIER = (Start, RoundVerdict, Finish, Rejoin)
FROM_FRONT_END = (Stop,)


class Overtaken(Exception):
    """A verdict has arrived or is due: the trees being drafted ahead are set aside, or sent as they are."""


class DrafterWorker:
    """Drafts for the requests of one verifier. control: the line to the front end; verdicts: the line to
    the verifier.
    """

    def __init__(self, drafter: Drafter, control: Dealer, verdicts: Dealer | LoopDealer, traced: bool = False):
        self.drafter, self.control, self.verdicts = drafter, control, verdicts
        self.trace = Trace(control, traced)
        self.poller = zmq.Poller()
        self.requests: dict[int, DraftedRequest] = {}
        self.rates = Rates()
        self._rejoined_for: set[int] = set()
        self.beat_ns = 0
        self.stopping = False

    def run(self) -> None:
        """Serve until the front end stops it."""
        self.control.send(Ready())
        for socket in (self.control.socket, self.verdicts.socket, self.verdicts.monitor):
            if socket is not None:
                self.poller.register(socket, zmq.POLLIN)
        while not self.stopping:
            self.turn()
            self._beat()
            self.poller.poll(0 if self._wanted() or self._idle() else int(HEARTBEAT_S * 1000))
            for _ in self.control.received():
                self.stopping = True
        self.trace.flush()

    def turn(self) -> None:
        """Process the messages that have arrived, then draft what is wanted now or may be wanted next."""
        if self.verdicts.joined():
            self._join()
        for message, arrays in self.verdicts.received():
            self._process(message, arrays)
        if not self.requests and self.drafter.renew():
            self._join()
        self._work()

    def draft_behind(self, trees: Mapping[int, int], verdicts: DeviceVerdicts) -> OnItsWay | None:
        """Begin to draft for what a round comes to: see `Drafter.draft_behind`."""
        drafted = {number for number, request in self.requests.items() if not request.given_up}
        known = {number: tree for number, tree in trees.items() if number in drafted}
        try:
            return self.drafter.draft_behind(known, verdicts) if known else None
        except Exception as error:  # the drafts are asked for once more, and then it is found whom to blame
            _raise_if_device_lost(error)
            return None

    def _join(self) -> None:
        """Introduce the drafter. The verifier then announces every request anew, so the known ones are dropped."""
        for _ in self.verdicts.received():
            pass
        for number in list(self.requests):
            self._process(Finish(request=number), [])
        wants = self.drafter
        self.verdicts.send(
            Hello(
                feature_layers=wants.feature_layers,
                successors=wants.successors,
                calibrated=wants.calibrated,
                rests=wants.rests,
                draft_s=wants.draft_s,
                read_s=wants.read_s,
            )
        )

    def _work(self) -> None:
        """Draft the trees that are waited for; if there are none, draft one batch of trees for possible outcomes."""
        if waited_for := self._wanted():
            self._draft(waited_for)
        elif idle := self._idle():
            self._attempt(self._draft_ahead, idle)

    def _wanted(self) -> list[int]:
        return [number for number, request in self.requests.items() if isinstance(request.state, WantedDraft)]

    def _idle(self) -> list[int]:
        return [number for number, request in self.requests.items() if request.idle is not None]

    def _attempt(self, work: Callable[[list[int]], None], numbers: list[int]) -> None:
        """Work for these requests together; if the drafter fails, work for each alone, which isolates the
        faulty one.
        """
        try:
            work(numbers)
        except Exception as error:
            _raise_if_device_lost(error)
            if len(numbers) == 1:
                self._give_up(numbers[0], error)
            else:
                for number in numbers:
                    self._attempt(work, [number])

    # What arrives.

    def _process(self, message: Any, arrays: list[Array]) -> None:
        """Process a message; an invalid one is counted and dropped."""
        if isinstance(message, Rejoin):
            return self._join()
        request = self.requests.get(message.request)
        try:
            if isinstance(message, Start):
                self._start(message, arrays[0].tolist())
            elif isinstance(message, Finish):
                if (ended := self.requests.pop(message.request, None)) is not None and not ended.given_up:
                    self.drafter.finish(message.request)
            elif request is not None:
                self._observe(message, arrays, request)
        except ProtocolError:
            self.verdicts.malformed += 1
        except Exception as error:  # a token or a feature that the drafter cannot process: the others continue
            _raise_if_device_lost(error)
            self._give_up(message.request, error)

    def _start(self, message: Start, text: list[int]) -> None:
        if message.request in self.requests or not text:
            raise ProtocolError("request is known, or has no text")
        self.requests[message.request] = DraftedRequest(message.round, text[-1])
        self.drafter.start(message.request, text, message.sampling)

    def _observe(self, message: RoundVerdict, arrays: list[Array], request: DraftedRequest) -> None:
        started = time.perf_counter_ns()
        path, tokens, missed = arrays[0].tolist(), arrays[1].tolist(), arrays[4].tolist()
        root = request.root
        if message.round > request.round and not missed:
            return self._rejoin_for(message.request)
        if missed:
            request.catch_up(message.round, missed[-1])
        tree = request.verified(message.draft).grafted(arrays[3].tolist(), GRAFT_PROB)
        if message.round != request.round or not _follows(tree, path, tokens):
            raise ProtocolError("verdict is of another round or does not follow its tree")
        self.rates, request.ahead = message.rates, message.ahead
        request.conclude(message.draft, path, tokens, message.root_only, started + round(message.rates.round_s * 1e9))
        waited_for = isinstance(request.state, WantedDraft)
        if not request.given_up:
            prices = message.rates.token_s, message.rates.row_tokens
            if missed:
                self.drafter.observe(message.request, Verdict(root, [0], missed, None, None, True, *prices))
            features = arrays[5] if len(arrays[5]) else None
            successors = arrays[2] if len(arrays[2]) == len(tree) else None
            self.drafter.observe(
                message.request, Verdict(tree, path, tokens, features, successors, message.rest, *prices)
            )
            if not waited_for:
                self.drafter.settle()
        self.trace.span("sync (miss)" if waited_for else "sync", started, message.request)

    def _rejoin_for(self, number: int) -> None:
        """Rejoin, because a verdict on this request has not arrived, so that no later one fits. After a second loss its
        verdicts are dropped: each time all texts are read anew.
        """
        if number in self._rejoined_for:
            raise ProtocolError("verdict is of a later round")
        self._rejoined_for.add(number)
        self._join()

    def _give_up(self, number: int, error: Exception) -> None:
        """Give up drafting for this request, on which the drafter failed: it gets root-only trees, which is plain
        decoding.
        """
        print(f"talon: drafter: request {number}: {type(error).__name__}: {error}; not drafted for", file=sys.stderr)
        if (request := self.requests.get(number)) is not None:
            request.given_up = True
            with contextlib.suppress(Exception):
                self.drafter.finish(number)

    # What is drafted.

    def _draft(self, numbers: list[int]) -> None:
        """Draft and send the trees that the verifier waits for."""
        started = time.perf_counter_ns()
        before_s = self.drafter.forward_s
        begun = {number: self.requests[number].begun for number in numbers}
        trees = {number: tree or self.requests[number].root for number, tree in begun.items()}

        def propose(of: list[int]) -> None:
            queries = [DraftQuery(number, ()) for number in of]
            for number, tree in zip(of, self.drafter.propose_many(queries), strict=True):
                trees[number] = tree

        if lacking := [n for n in numbers if not self._enough(trees[n]) and not self.requests[n].given_up]:
            self._attempt(propose, lacking)
        for number, tree in trees.items():
            request = self.requests[number]
            outcome, sent = request.answer(tree.marked(self.drafter.source))
            self._send(number, outcome, sent, before_s)
            before_s = self.drafter.forward_s  # their time is counted once
            self.trace.span("draft", started, number, f"{len(tree)} nodes")
        self._attempt(lambda of: self.drafter.settle(), numbers)

    def _enough(self, tree: TokenTree) -> bool:
        """Return whether the tree may be sent as it is."""
        return len(tree) > 1 and float(tree.confidence.sum()) > ENOUGH_TOKENS * self.rates.tokens

    def _draft_ahead(self, numbers: list[int]) -> None:
        """Draft trees for the next few likeliest outcomes of the running rounds."""
        started = time.perf_counter_ns()
        running = {number: idle for number in numbers if (idle := self.requests[number].idle) is not None}
        batch = self._next(running)
        outcomes = [
            DraftKey(self.requests[one.request].round + 1, running[one.request].under.draft, one.node, one.token)
            for one in batch
        ]
        queries = [
            DraftQuery(one.request, [*running[one.request].under.tree.path_tokens(one.node)[1:], one.token])
            for one in batch
        ]
        before_s = self.drafter.forward_s
        trees: dict[int, TokenTree] = {}
        last_ns = started

        def stop_in_time(so_far: Callable[[], dict[int, TokenTree]]) -> None:
            nonlocal trees, last_ns
            now_ns = time.perf_counter_ns()
            step_ns, last_ns = now_ns - last_ns, now_ns
            if self.poller.poll(0):
                for row, tree in so_far().items():
                    running[batch[row].request].begun[outcomes[row]] = tree
                for guess in reversed(batch):  # requests other than the message's still have time
                    running[guess.request].put_back(guess)
                raise Overtaken
            if any(now_ns <= running[guess.request].due_ns < now_ns + step_ns for guess in batch):
                trees = so_far()
                raise Overtaken

        with contextlib.suppress(Overtaken):
            trees = dict(enumerate(self.drafter.propose_many(queries, stop_in_time)))
        for row, tree in trees.items():
            if len(tree) > 1:
                number = batch[row].request
                sent = self.requests[number].add(outcomes[row], tree.marked(self.drafter.source))
                self._send(number, outcomes[row], sent, before_s)
                before_s = self.drafter.forward_s  # the batch's time is counted once
        what = f"{len(trees)} outcomes" if trees else "overtaken"
        self.trace.span("draft ahead", started, min((guess.request for guess in batch), default=0), what)

    def _next(self, running: dict[int, Running]) -> list[Outcome]:
        """Return the outcomes to draft for now, removed from their requests' lists, which are ranked
        first if needed.
        """
        unranked = {number: state.under.tree for number, state in running.items() if state.guesses is None}
        outcomes = likeliest(unranked, self.drafter.following, OUTCOMES, LEAST_OUTCOME) if unranked else []
        for number in unranked:
            running[number].guesses = deque(outcome for outcome in outcomes if outcome.request == number)
        guesses = [guess for state in running.values() for guess in state.guesses or ()]
        batch = heapq.nlargest(self.drafter.together, guesses, key=lambda guess: guess.prob)
        for guess in batch:
            running[guess.request].take(guess)
        return batch

    def _send(self, number: int, outcome: DraftKey, sent: Sent, since_s: float) -> None:
        draft = Draft(
            request=number,
            round=outcome.round,
            draft=sent.draft,
            parent=outcome.draft,
            node=outcome.node,
            token=outcome.token,
            draft_us=int((self.drafter.forward_s - since_s) * 1e6),
        )
        tree = sent.tree
        self.verdicts.send(draft, [tree.tokens, tree.parents, tree.confidence, tree.source])

    def _beat(self) -> None:
        now = time.perf_counter_ns()
        if now - self.beat_ns > HEARTBEAT_S * 1e9:
            self.beat_ns = now
            self.control.send(Heartbeat())
            self.trace.flush()


def _raise_if_device_lost(error: Exception) -> None:
    """Raise an error of the device, after which no request can be drafted for: this worker ends, and the next one
    continues.

    Drafters without a model do not import torch.
    """
    if (torch := sys.modules.get("torch")) is not None and isinstance(error, torch.AcceleratorError):
        raise error


def _follows(tree: TokenTree, path: list[int], tokens: list[int]) -> bool:
    """Return whether a verdict fits this tree: a path from the root, its tokens, and one more."""
    if not path or path[0] != 0 or len(tokens) != len(path):
        return False
    steps = zip(path, path[1:], tokens, strict=False)
    return all(tree.child(above, token) == node for above, node, token in steps)
