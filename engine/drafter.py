"""The drafter worker: owns the drafter, hears every verdict, and has the next tree ready before it is asked for.

When a verdict names the tree that the next round verifies, or once it has sent one, the worker ranks that round's
outcomes and drafts for the likeliest, a few at a time, each sent as soon as it is there. What has arrived is read
before anything is drafted, so that no draft is made for an outcome already overtaken.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import zmq

from drafters.base import Drafter
from drafters.base import Verdict as Observed
from drafters.outcomes import Outcome as Guess
from drafters.outcomes import likeliest
from engine.errors import ProtocolError
from engine.messages import Array, Draft, Finish, Heartbeat, Hello, Ready, Start, Stop, Verdict
from engine.trace import Trace
from engine.transport import Line
from engine.tree import GRAFT_CHANCE, TokenTree

FROM_VERIFIER = (Start, Verdict, Finish)
FROM_FRONT_END = (Stop,)
HEARTBEAT_S = 0.5
OUTCOMES = 24  # drafted for in one round at most
_ENOUGH = 0.75  # of the usual expected tokens: with so many a tree goes out unfinished if it is waited for

Outcome = tuple[int, int, int]
"""(draft, node, token), as a `Draft` names it."""


class Overtaken(Exception):
    """A verdict has come, or is due: what is being drafted ahead goes out as it is or is not wanted any more."""


class _Request:
    """round: the one under way. under: the draft it verifies, 0 if that is not ours (yet).

    sent: what may be verified, or what is; 0 is the root alone. wanted: the outcome to draft for now. guesses: those to
    draft ahead. begun: the trees that were being drafted when the verdict came, by outcome.
    """

    def __init__(self, round_: int, last_token: int):
        self.round, self.last_token = round_, last_token
        self.sent: dict[int, tuple[Outcome, TokenTree]] = {}
        self.drafts = 0
        self.under = 0
        self.ahead = False
        self.wanted: Outcome | None = None
        self.guesses: deque[Guess] | None = None
        self.begun: dict[Outcome, TokenTree] = {}
        self.since_ns = 0  # when the verifier began the round under way, as far as known here; 0 if it waits for a tree
        self.given_up = False

    def number_of(self, outcome: Outcome) -> int:
        """The draft that was sent for `outcome`, 0 if none was."""
        return next((number for number, (known, _) in self.sent.items() if number and known == outcome), 0)

    def proceed(self, outcome: Outcome, alone: bool) -> None:
        """The outcome came true. alone: the next round is under way and verifies its token alone."""
        self.under = 0 if alone else self.number_of(outcome)
        if alone:
            self.sent = {0: (outcome, TokenTree.root_only(self.last_token))}
        else:
            self.sent = {self.under: self.sent[self.under]} if self.under else {}
        self.wanted = None if alone or self.under else outcome
        self.begun = {outcome: self.begun[outcome]} if outcome in self.begun and self.wanted else {}
        self.guesses = None


class DrafterWorker:
    """control: the line to the front end; verdicts: the line to the verifier."""

    def __init__(self, drafter: Drafter, control: Line, verdicts: Line, traced: bool = False):
        self.drafter, self.control, self.verdicts = drafter, control, verdicts
        self.trace = Trace(control, traced)
        self.poller = zmq.Poller()
        self.requests: dict[int, _Request] = {}
        self.expected = 2.0  # tokens that a tree usually brings, by its own account
        self.round_ns: dict[bool, float] = {}  # how long the rounds of a root alone (True) and of a tree take
        self.heard_ns = 0
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        self.control.send(Ready())
        for socket in (self.control.socket, self.verdicts.socket, self.verdicts.monitor):
            if socket is not None:
                self.poller.register(socket, zmq.POLLIN)
        while not self.stopping:
            if self.verdicts.joined():
                self._join()
            busy = any(self._has_work(request) for request in self.requests.values())
            self.poller.poll(0 if busy else int(HEARTBEAT_S * 1000))
            for _ in self.control.received():
                self.stopping = True
            for message, arrays in self.verdicts.received():
                self._hear(message, arrays)
            self._work()
            self._beat()
        self.trace.flush()

    def _join(self) -> None:
        """Tell the verifier who drafts; it then names every request anew, so what an earlier one said is forgotten."""
        for _ in self.verdicts.received():
            pass
        for number in list(self.requests):
            self._hear(Finish(request=number), [])
        wants = self.drafter
        self.verdicts.send(
            Hello(feature_layers=wants.feature_layers, successors=wants.successors, calibrated=wants.calibrated)
        )

    def _has_work(self, request: _Request) -> bool:
        unranked = request.guesses is None and request.under in request.sent and not request.given_up
        return request.wanted is not None or (request.ahead and (unranked or bool(request.guesses)))

    def _work(self) -> None:
        """The trees that are waited for; if there are none, one batch of those that may be."""
        waited_for = [number for number, request in self.requests.items() if request.wanted is not None]
        if waited_for:
            self._draft(waited_for)
        elif idle := [number for number, request in self.requests.items() if self._has_work(request)]:
            self._attempt(self._draft_ahead, idle)

    def _attempt(self, work: Callable[[list[int]], None], numbers: list[int]) -> None:
        """Work for these requests together; if the drafter cannot, for each alone, which shows the one at fault."""
        try:
            work(numbers)
        except Exception as error:
            if len(numbers) == 1:
                self._give_up(numbers[0], error)
            else:
                for number in numbers:
                    self._attempt(work, [number])

    # What arrives.

    def _hear(self, message: Any, arrays: list[Array]) -> None:
        """Take in a message; one that makes no sense is counted and dropped."""
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
        except Exception as error:  # a token or a feature that the drafter cannot digest: the others go on
            self._give_up(message.request, error)

    def _start(self, message: Start, text: list[int]) -> None:
        if message.request in self.requests or not text:
            raise ProtocolError("request is known, or has no text")
        request = self.requests[message.request] = _Request(message.round, text[-1])
        if message.round:
            request.wanted = (0, 0, text[-1])
        self.drafter.start(message.request, text, message.sampling)

    def _observe(self, message: Verdict, arrays: list[Array], request: _Request) -> None:
        started = time.perf_counter_ns()
        path, tokens = arrays[0].tolist(), arrays[1].tolist()
        tree = request.sent[message.draft][1] if message.draft in request.sent else None
        tree = (tree or TokenTree.root_only(request.last_token)).grafted(arrays[4].tolist(), GRAFT_CHANCE)
        if message.round != request.round or not _follows(tree, path, tokens):
            raise ProtocolError("verdict is of another round or does not follow its tree")
        outcome = (message.draft, path[-1], tokens[-1])
        self._time(request, started)
        request.round, request.last_token, request.ahead = message.round + 1, tokens[-1], message.ahead
        request.proceed(outcome, message.alone)
        request.since_ns = 0 if request.wanted else started
        if not request.given_up:
            features = arrays[2] if arrays[2].size else None
            successors = arrays[3] if len(arrays[3]) == len(tree) else None
            self.drafter.observe(message.request, Observed(tree, path, tokens, features, successors))
            if request.wanted is None:
                self.drafter.settle()
        self.trace.span("sync (miss)" if request.wanted else "sync", started, message.request)

    def _time(self, request: _Request, now_ns: int) -> None:
        """A verdict has come: learn how long a round takes from one verdict to the next."""
        if request.since_ns:
            kind, taken_ns = request.under == 0, now_ns - request.since_ns
            self.round_ns[kind] = 0.8 * self.round_ns.get(kind, taken_ns) + 0.2 * taken_ns

    def _due_ns(self, request: _Request) -> float:
        """When the verdict of the round under way is to be expected."""
        return request.since_ns + self.round_ns.get(request.under == 0, float("inf"))

    def _give_up(self, number: int, error: Exception) -> None:
        """The drafter cannot go on with this request: it gets root-only trees, which is plain decoding."""
        print(f"talon: drafter: request {number}: {type(error).__name__}: {error}; not drafted for", file=sys.stderr)
        if (request := self.requests.get(number)) is not None:
            request.given_up, request.guesses = True, deque()
            with contextlib.suppress(Exception):
                self.drafter.finish(number)

    # What is drafted.

    def _draft(self, numbers: list[int]) -> None:
        """The trees that the verifier waits for."""
        started = time.perf_counter_ns()
        before_s = self.drafter.forward_s
        trees = {number: self._begun(self.requests[number]) for number in numbers}

        def propose(of: list[int]) -> None:
            for number, tree in zip(of, self.drafter.propose_many([(number, ()) for number in of]), strict=True):
                trees[number] = tree
                self.expected += 0.1 * (float(tree.confidence.sum()) - self.expected)

        if lacking := [n for n in numbers if not self._enough(trees[n]) and not self.requests[n].given_up]:
            self._attempt(propose, lacking)
        for number, tree in trees.items():
            request = self.requests[number]
            assert request.wanted is not None
            request.under = self._send(number, request, request.round, request.wanted, tree, before_s)
            request.wanted = None
            before_s = self.drafter.forward_s  # their time is counted once
            self.trace.span("draft", started, number, f"{len(tree)} nodes")
        self._attempt(lambda of: self.drafter.settle(), numbers)

    def _begun(self, request: _Request) -> TokenTree:
        """What there is of the tree that is waited for."""
        assert request.wanted is not None
        return request.begun.get(request.wanted, TokenTree.root_only(request.last_token))

    def _enough(self, tree: TokenTree) -> bool:
        """Whether the tree may go out as it is."""
        return len(tree) > 1 and float(tree.confidence.sum()) > _ENOUGH * self.expected

    def _rank(self, numbers: list[int]) -> None:
        """What is to be drafted ahead for these requests, likeliest first."""
        trees = {n: r.sent[r.under][1] for n in numbers for r in [self.requests[n]] if r.guesses is None}
        outcomes = likeliest(trees, self.drafter.following, OUTCOMES) if trees else []
        for number in trees:
            self.requests[number].guesses = deque(outcome for outcome in outcomes if outcome.request == number)

    def _draft_ahead(self, numbers: list[int]) -> None:
        """Trees for the next few of the likeliest outcomes of the rounds under way."""
        started = time.perf_counter_ns()
        self._rank(numbers)
        guesses = [guess for number in numbers for guess in self.requests[number].guesses or ()]
        batch = heapq.nlargest(self.drafter.together, guesses, key=lambda guess: guess.chance)
        for guess in batch:
            cast(deque[Guess], self.requests[guess.request].guesses).remove(guess)
        before_s = self.drafter.forward_s
        asked = {guess.request: self.requests[guess.request] for guess in batch}
        named = [(asked[guess.request].under, guess.node, guess.token) for guess in batch]
        wanted = [
            (guess.request, [*asked[guess.request].sent[under][1].path_tokens(node)[1:], token])
            for guess, (under, node, token) in zip(batch, named, strict=True)
        ]

        trees: dict[int, TokenTree] = {}
        last_ns = started

        def stop_in_time(so_far: Callable[[], dict[int, TokenTree]]) -> None:
            nonlocal trees, last_ns
            now_ns = time.perf_counter_ns()
            step_ns, last_ns = now_ns - last_ns, now_ns
            if self.poller.poll(0):
                for row, tree in so_far().items():
                    asked[batch[row].request].begun[named[row]] = tree
                for guess in reversed(batch):  # for those of other requests than the message's there is time yet
                    cast(deque[Guess], asked[guess.request].guesses).appendleft(guess)
                raise Overtaken
            if any(now_ns <= self._due_ns(request) < now_ns + step_ns for request in asked.values()):
                trees = so_far()
                raise Overtaken

        with contextlib.suppress(Overtaken):
            trees = dict(enumerate(self.drafter.propose_many(wanted, stop_in_time)))
        for row, ahead in trees.items():
            if len(ahead) == 1:
                continue
            number = batch[row].request
            self._send(number, asked[number], asked[number].round + 1, named[row], ahead, before_s)
            before_s = self.drafter.forward_s  # the batch's time is counted once
        self.trace.span(
            "draft ahead", started, min(asked, default=0), f"{len(trees)} outcomes" if trees else "overtaken"
        )

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


def _follows(tree: TokenTree, path: list[int], tokens: list[int]) -> bool:
    """Whether a verdict is one on this tree: a path from the root, its tokens, and one more."""
    if not path or path[0] != 0 or len(tokens) != len(path):
        return False
    steps = zip(path, path[1:], tokens, strict=False)
    return all(tree.child(above, token) == node for above, node, token in steps)
