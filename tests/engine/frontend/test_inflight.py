"""Which requests a verifier is handed, and which are given up."""

from __future__ import annotations

import pytest

from engine.core.errors import RequestFailed, WorkerDied
from engine.core.params import SamplingParams
from engine.frontend.inflight import InflightRequest, InflightRequests
from engine.wire.messages import PromptProgress, Tokens


@pytest.fixture
def inflight() -> InflightRequests:
    return InflightRequests({number: InflightRequest(number, [5], SamplingParams()) for number in range(3)})


def hand_over(inflight: InflightRequests, verifier: str) -> list[int]:
    due = inflight.due(verifier)
    for request in due:
        request.verifier = verifier
    return [request.number for request in due]


def token(inflight: InflightRequests, number: int) -> None:
    none = dict.fromkeys(("round", "nodes", "round_us", "forward_us", "draft_us", "busy_us", "at_us"), 0)
    inflight.deliver(number, Tokens(request=number, tokens=(7,), finish_reason=None, hit=False, **none))


def test_a_new_verifier_is_handed_all_that_go_on_and_each_once(inflight: InflightRequests) -> None:
    inflight[1].ended = True
    assert hand_over(inflight, "one") == [0, 2]
    assert hand_over(inflight, "one") == []
    inflight.lose("one")
    assert hand_over(inflight, "two") == [0, 2]


def test_what_was_there_when_two_verifiers_died_is_handed_over_one_by_one(inflight: InflightRequests) -> None:
    for verifier in ("one", "two"):
        assert hand_over(inflight, verifier) == [0, 1, 2]
        inflight.lose(verifier)
    inflight[3] = InflightRequest(3, [5], SamplingParams())  # that came later waits too
    for suspect in range(3):
        assert hand_over(inflight, "three") == [suspect]
        assert hand_over(inflight, "three") == []
        token(inflight, suspect)
    assert hand_over(inflight, "three") == [3]


def test_the_one_that_ends_every_verifier_fails_and_the_others_go_on(inflight: InflightRequests) -> None:
    for number in range(9):
        verifier = str(number)
        while (handed := hand_over(inflight, verifier)) and 1 not in handed:
            token(inflight, handed[0])
        inflight.lose(verifier)
        if inflight[1].ended:
            break
    assert number == 4, "the fifth"
    error = inflight[1].arrivals.get_nowait()
    assert isinstance(error, WorkerDied) and "5 verifiers in a row" in str(error)
    assert not inflight[0].ended and not inflight[2].ended
    assert hand_over(inflight, "last") == [2], "which had no chance to show itself"
    token(inflight, 2)
    assert hand_over(inflight, "last") == [0]


def test_a_suspect_that_was_cancelled_holds_nobody_up(inflight: InflightRequests) -> None:
    for verifier in ("one", "two"):
        hand_over(inflight, verifier)
        inflight.lose(verifier)
    assert hand_over(inflight, "three") == [0]
    del inflight[0]
    assert hand_over(inflight, "three") == [1]


def progress(number: int, read: int) -> PromptProgress:
    return PromptProgress(request=number, read=read, total=64, cached=0, elapsed_us=0, left_us=0)


def test_how_far_a_prompt_is_is_told_until_its_answer_begins() -> None:
    told: list[int] = []
    request = InflightRequest(0, [5], SamplingParams(), lambda progress: told.append(progress.read))
    inflight = InflightRequests({0: request})
    for read in (16, 32):
        inflight.note(progress(0, read))
    assert told == [16, 32] and request.progress == progress(0, 32)
    token(inflight, 0)
    assert request.progress is None


def test_how_far_a_prompt_was_that_has_been_cancelled_is_told_to_nobody(inflight: InflightRequests) -> None:
    inflight[1].deliver(WorkerDied("it failed"))
    for number in (1, 7):
        inflight.note(progress(number, 16))
    assert inflight[1].progress is None


def test_a_caller_that_fails_when_told_how_far_its_prompt_is_ends_its_own_request() -> None:
    def fails(progress: PromptProgress) -> None:
        raise KeyError(f"read {progress.read}\nof {progress.total}")

    inflight = InflightRequests({number: InflightRequest(number, [5], SamplingParams(), fails) for number in (0, 1)})
    inflight.note(progress(0, 16))
    error = inflight[0].arrivals.get_nowait()
    assert isinstance(error, RequestFailed) and str(error).startswith("on_progress: ") and "read 16" in str(error)
    assert inflight[0].ended and inflight[0].progress is None and not inflight[1].ended
    inflight.note(progress(0, 32))
    assert inflight[0].arrivals.empty()
