"""The drafter worker behind real sockets, with a drafter whose every answer is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import zmq

from engine.core.drafter_protocol import BetweenSteps, DeviceVerdicts, Drafter, OnItsWay, Verdict
from engine.core.outcomes import DraftQuery
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.drafting.states import DraftedRequest
from engine.drafting.worker import FROM_FRONT_END, FROM_VERIFIER, DrafterWorker
from engine.wire.messages import Draft, Finish, Heartbeat, Hello, Rates, Ready, Rejoin, RoundVerdict, Start, Stop
from engine.wire.transport import Dealer, Router


class Counting(Drafter):
    """Behind token t comes t + 1 for sure."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.told: list[tuple[bool, float, float]] = []

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.text = list(prompt)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        last = [*self.text, *continuation][-1]
        return TokenTree.chain(last, [last + 1, last + 2], [0.9, 0.8])

    def observe(self, request: int, verdict: Verdict) -> None:
        self.text += verdict.tokens
        self.told.append((verdict.rest, verdict.token_s, verdict.row_tokens))

    def finish(self, request: int) -> None:
        self.text = []


class Behind(Counting):
    """Fails to draft behind a round, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[int, int]] = []
        self.error: Exception | None = None

    def draft_behind(self, trees: Mapping[int, int], verdicts: DeviceVerdicts) -> OnItsWay | None:
        self.asked.append(dict(trees))
        if self.error is not None:
            raise self.error
        return cast(OnItsWay, self)


class Slow(Counting):
    """Never ends what it drafts ahead. drafting: it has begun; go_on: the first step may end."""

    def __init__(self) -> None:
        super().__init__()
        self.drafting, self.go_on = threading.Event(), threading.Event()

    def propose_many(self, wanted: Sequence[DraftQuery], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        if between_steps is None:
            return super().propose_many(wanted)
        self.drafting.set()
        assert self.go_on.wait(20)
        begun = {row: TokenTree.chain(last[-1], [77], [0.95]) for row, (_, last) in enumerate(wanted)}
        while True:
            between_steps(lambda: begun)


class Verifier:
    """The test's end of the worker's line."""

    def __init__(self, router: Router):
        self.router = router
        peer, self.hello, _ = self.receive()
        self.peer = peer

    def receive(self) -> tuple[str, Any, list[Any]]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for arrival in self.router.received():
                return arrival
            time.sleep(0.002)
        raise AssertionError("nothing arrived")

    def draft(self) -> tuple[Draft, TokenTree]:
        _, message, arrays = self.receive()
        assert isinstance(message, Draft)
        return message, TokenTree(*arrays)

    def verdict(
        self,
        round_: int,
        draft: int,
        path: list[int],
        tokens: list[int],
        forced_tokens: Sequence[int] = (),
        missed: Sequence[int] = (),
        **fields: Any,
    ) -> None:
        message = RoundVerdict(request=1, round=round_, draft=draft, **fields)
        features, successors = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0), np.int32)
        grafted, earlier = np.asarray(forced_tokens, np.int32), np.asarray(missed, np.int32)
        arrays = [np.asarray(path), np.asarray(tokens), successors, grafted, earlier, features]
        self.router.send(self.peer, message, arrays)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def verifier(request: pytest.FixtureRequest, counting: Counting) -> Iterator[Verifier]:
    drafter = request.getfixturevalue("slow") if "slow" in request.fixturenames else counting
    context: zmq.Context[Any] = zmq.Context()
    front_end = Router(context, "inproc://control", (Ready, Heartbeat))
    router = Router(context, "inproc://drafts", (Hello, Draft))
    control = Dealer(context, "inproc://control", "drafter-1", FROM_FRONT_END)
    verdicts = Dealer(context, "inproc://drafts", "drafter-1", FROM_VERIFIER)
    thread = threading.Thread(target=DrafterWorker(drafter, control, verdicts).run)
    thread.start()
    verifier = Verifier(router)
    verifier.router.send(
        verifier.peer, Start(request=1, round=0, sampling=SamplingParams()), [np.asarray([5, 6], np.int32)]
    )
    yield verifier
    front_end.send("drafter-1", Stop())
    thread.join(20)
    assert not thread.is_alive()
    context.destroy(linger=0)


def test_a_verdict_is_answered_with_the_tree_of_its_outcome(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7])
    draft, tree = verifier.draft()
    assert (draft.round, draft.parent, draft.node, draft.token) == (1, 0, 0, 7)
    assert tree.tokens.tolist() == [7, 8, 9]


def test_the_drafter_is_told_what_tokens_and_rows_are_worth(verifier: Verifier, counting: Counting) -> None:
    verifier.verdict(0, 0, [0], [7], rates=Rates(0.2, 1.5, 0.25, 0.125))
    verifier.draft()
    verifier.verdict(2, 0, [0], [9], missed=[8], rates=Rates(0.2, 1.5, 0.5, 0.0))
    verifier.draft()
    assert counting.told == [(False, 0.25, 0.125), (True, 0.5, 0.0), (False, 0.5, 0.0)]


def test_what_the_verifier_grafts_onto_a_draft_is_part_of_the_verdict(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7])
    first, _ = verifier.draft()
    # 7 -> 8 -> 9 was drafted, 7 -> 8 -> 40 -> 41 became part of it, and 50 was drawn behind that
    verifier.verdict(1, first.draft, [0, 1, 3, 4], [8, 40, 41, 50], forced_tokens=[8, 40, 41])
    second, tree = verifier.draft()
    assert (second.round, second.parent, second.node, second.token) == (2, first.draft, 4, 50)
    assert tree.tokens.tolist() == [50, 51, 52]
    verifier.verdict(2, 0, [0, 1], [60, 61], forced_tokens=[60])  # the root alone, with a graft
    assert verifier.draft()[0].token == 61


def test_in_turns_nothing_is_drafted_before_it_is_asked_for(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7])
    first, _ = verifier.draft()
    time.sleep(0.2)
    assert not list(verifier.router.received())
    verifier.verdict(1, first.draft, [0], [30])
    assert verifier.draft()[0].token == 30


def test_ahead_the_likeliest_outcome_is_drafted_while_the_round_runs(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7], ahead=True)
    first, _ = verifier.draft()
    ahead, tree = verifier.draft()
    # all of 7 -> 8 -> 9 is accepted and 10 is drawn
    assert (ahead.round, ahead.parent, ahead.node, ahead.token) == (2, first.draft, 2, 10)
    assert tree.tokens.tolist() == [10, 11, 12]


def test_on_a_hit_the_worker_goes_on_from_the_tree_the_verifier_has(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7], ahead=True)
    first, _ = verifier.draft()
    ahead, _ = verifier.draft()
    verifier.verdict(1, first.draft, [0, 1, 2], [8, 9, 10], ahead=True)
    following, tree = verifier.draft()
    assert (following.round, following.parent, following.node, following.token) == (3, ahead.draft, 2, 13)
    assert tree.tokens.tolist() == [13, 14, 15]


def test_on_a_miss_the_outcome_that_came_true_is_drafted_first(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7], ahead=True)
    first, _ = verifier.draft()
    verifier.draft()
    verifier.verdict(1, first.draft, [0], [50], ahead=True)
    draft, tree = verifier.draft()
    assert (draft.round, draft.parent, draft.node, draft.token) == (2, first.draft, 0, 50)
    assert tree.tokens.tolist() == [50, 51, 52]


def test_while_the_root_is_verified_alone_what_may_follow_it_is_drafted(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7], ahead=True, root_only=True)
    ahead, tree = verifier.draft()
    assert (ahead.round, ahead.parent, ahead.node, ahead.token) == (2, 0, 0, 8)
    assert tree.tokens.tolist() == [8, 9, 10]
    verifier.verdict(1, 0, [0], [8], ahead=True)
    following, _ = verifier.draft()
    assert (following.round, following.parent) == (3, ahead.draft)


def test_a_tree_under_way_when_its_outcome_comes_true_goes_out_as_it_is(slow: Slow, verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7], ahead=True)
    first, _ = verifier.draft()
    assert slow.drafting.wait(20)
    verifier.verdict(1, first.draft, [0, 1, 2], [8, 9, 10], ahead=False)
    slow.go_on.set()
    draft, tree = verifier.draft()
    assert (draft.round, draft.token, tree.tokens.tolist()) == (2, 10, [10, 77])


def test_tokens_of_rounds_without_a_verdict_come_with_the_next_one_and_nothing_drafted_before_them_is_used(
    verifier: Verifier, counting: Counting
) -> None:
    verifier.verdict(0, 0, [0], [7], ahead=True, root_only=True)
    first, _ = verifier.draft()
    assert first.token == 8
    verifier.verdict(3, 0, [0], [8], missed=[30, 31])
    draft, tree = verifier.draft()
    assert (draft.round, draft.parent, draft.node, draft.token) == (4, 0, 0, 8)
    assert tree.tokens.tolist() == [8, 9, 10] and draft.draft > first.draft
    assert counting.text == [5, 6, 7, 30, 31, 8]


def test_a_drafter_that_fails_on_them_keeps_step_and_drafts_nothing(
    verifier: Verifier, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(request: int, verdict: Verdict) -> None:
        raise ValueError("seven tokens behind one node")

    verifier.verdict(0, 0, [0], [7])
    verifier.draft()
    monkeypatch.setattr(counting, "observe", fails)
    verifier.verdict(5, 0, [0], [30], missed=[8, 20, 21, 22])
    draft, tree = verifier.draft()
    assert (draft.round, draft.token, tree.tokens.tolist()) == (6, 30, [30])
    verifier.verdict(6, draft.draft, [0], [31])
    draft, tree = verifier.draft()
    assert (draft.round, draft.token, tree.tokens.tolist()) == (7, 31, [31])


class Lost(Counting):
    """Its device fails in one of the calls."""

    def __init__(self, call: str):
        super().__init__()
        self.call = call

    def _fail_in(self, call: str) -> None:
        if self.call == call:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._fail_in("start")
        super().start(request, prompt, sampling)

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        self._fail_in("propose")
        return super().propose(request, continuation)

    def observe(self, request: int, verdict: Verdict) -> None:
        self._fail_in("observe")
        super().observe(request, verdict)


@pytest.mark.parametrize("call", ["start", "propose", "observe"])
def test_an_error_of_the_device_ends_the_worker_instead_of_one_request(call: str) -> None:
    """Its context is spoilt for every request: only another process can draft on."""
    lines = SimpleNamespace(malformed=0, send=lambda *_: None)
    nothing: Any = lines
    worker = DrafterWorker(Lost(call), nothing, nothing)
    arrays = [np.asarray([0]), np.asarray([7]), np.zeros((0, 0)), np.zeros(0, np.int32), np.zeros(0, np.int32)]
    with pytest.raises(torch.AcceleratorError):
        worker._process(Start(request=1, round=0, sampling=SamplingParams()), [np.asarray([5, 6], np.int32)])
        worker._process(RoundVerdict(request=1, round=0, draft=0), [*arrays, np.zeros((0, 0, 0), np.float32)])
        worker._work()


def test_a_verdict_that_repeats_what_is_known_is_dropped(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7])
    verifier.draft()
    verifier.verdict(0, 0, [0], [30], missed=[7])
    verifier.verdict(1, 1, [0], [40])
    assert verifier.draft()[0].token == 40


def test_a_finished_request_is_drafted_for_no_more(verifier: Verifier) -> None:
    verifier.router.send(verifier.peer, Finish(request=1))
    verifier.verdict(0, 0, [0], [7], ahead=True)
    verifier.router.send(verifier.peer, Start(request=2, round=1, sampling=SamplingParams(max_tokens=9)), [[5]])
    assert verifier.draft()[0].request == 2


def test_a_drafter_asked_to_rejoin_says_hello_and_drafts_from_the_texts_it_is_told_of_then(verifier: Verifier) -> None:
    verifier.router.send(verifier.peer, Rejoin())
    assert verifier.receive()[1] == verifier.hello
    text = np.asarray([5, 6, 7, 40], np.int32)
    verifier.router.send(verifier.peer, Start(request=1, round=3, sampling=SamplingParams()), [text])
    draft, tree = verifier.draft()
    assert draft.round == 3 and tree.tokens.tolist() == [40, 41, 42]


def test_a_drafter_that_has_missed_a_verdict_rejoins_once_for_the_request(verifier: Verifier) -> None:
    verifier.verdict(0, 0, [0], [7])
    verifier.draft()
    for _ in range(2):
        verifier.verdict(2, 0, [0], [9])
    assert verifier.receive()[1] == verifier.hello
    text = np.asarray([5, 6, 7, 8, 9], np.int32)
    verifier.router.send(verifier.peer, Start(request=1, round=3, sampling=SamplingParams()), [text])
    draft, tree = verifier.draft()
    assert draft.round == 3 and tree.tokens.tolist() == [9, 10, 11]
    verifier.verdict(4, 0, [0], [40])
    verifier.verdict(3, draft.draft, [0], [50])
    assert verifier.draft()[1].tokens.tolist() == [50, 51, 52], "the later verdict was dropped"


def test_what_is_drafted_behind_a_round_may_fail_and_is_not_asked_of_a_drafter_that_has_given_a_request_up() -> None:
    """Whether a request is to blame is found when its tree is asked for."""
    drafter, nothing, verdicts = Behind(), cast(Any, None), cast(Any, object())
    worker = DrafterWorker(drafter, nothing, nothing)
    for number in (1, 2, 3):
        worker.requests[number] = DraftedRequest(1, 5)
    worker.requests[2].given_up = True
    assert worker.draft_behind({1: 0, 2: 1, 3: 2, 4: 3}, verdicts) is drafter
    assert drafter.asked == [{1: 0, 3: 2}]
    assert worker.draft_behind({2: 0}, verdicts) is None and len(drafter.asked) == 1
    drafter.error = torch.OutOfMemoryError()
    assert worker.draft_behind({1: 0}, verdicts) is None and not worker.requests[1].given_up
    drafter.error = torch.AcceleratorError("lost")
    with pytest.raises(torch.AcceleratorError):
        worker.draft_behind({1: 0}, verdicts)
    assert Counting().draft_behind({1: 0}, verdicts) is None
