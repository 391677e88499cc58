"""Which requests a verifier is handed, and which are given up."""

from __future__ import annotations

import pytest

from engine.core.errors import WorkerDied
from engine.core.params import SamplingParams
from engine.frontend.inflight import InflightRequest, InflightRequests
from engine.wire.messages import Tokens


@pytest.fixture
def flights() -> InflightRequests:
    return InflightRequests({number: InflightRequest(number, [5], SamplingParams()) for number in range(3)})


def hand_over(flights: InflightRequests, verifier: str) -> list[int]:
    due = flights.due(verifier)
    for flight in due:
        flight.verifier = verifier
    return [flight.number for flight in due]


def token(flights: InflightRequests, number: int) -> None:
    none = dict.fromkeys(("round", "nodes", "round_us", "forward_us", "draft_us", "busy_us", "at_us"), 0)
    flights.hear(number, Tokens(request=number, tokens=(7,), finish_reason=None, hit=False, **none))


def test_a_new_verifier_is_handed_all_that_go_on_and_each_once(flights: InflightRequests) -> None:
    flights[1].ended = True
    assert hand_over(flights, "one") == [0, 2]
    assert hand_over(flights, "one") == []
    flights.lose("one")
    assert hand_over(flights, "two") == [0, 2]


def test_what_was_there_when_two_verifiers_died_is_handed_over_one_by_one(flights: InflightRequests) -> None:
    for verifier in ("one", "two"):
        assert hand_over(flights, verifier) == [0, 1, 2]
        flights.lose(verifier)
    flights[3] = InflightRequest(3, [5], SamplingParams())  # that came later waits too
    for suspect in range(3):
        assert hand_over(flights, "three") == [suspect]
        assert hand_over(flights, "three") == []
        token(flights, suspect)
    assert hand_over(flights, "three") == [3]


def test_the_one_that_ends_every_verifier_fails_and_the_others_go_on(flights: InflightRequests) -> None:
    for number in range(9):
        verifier = str(number)
        while (handed := hand_over(flights, verifier)) and 1 not in handed:
            token(flights, handed[0])
        flights.lose(verifier)
        if flights[1].ended:
            break
    assert number == 4, "the fifth"
    error = flights[1].arrivals.get_nowait()
    assert isinstance(error, WorkerDied) and "5 verifiers in a row" in str(error)
    assert not flights[0].ended and not flights[2].ended
    assert hand_over(flights, "last") == [2], "which had no chance to show itself"
    token(flights, 2)
    assert hand_over(flights, "last") == [0]


def test_a_suspect_that_was_cancelled_holds_nobody_up(flights: InflightRequests) -> None:
    for verifier in ("one", "two"):
        hand_over(flights, verifier)
        flights.lose(verifier)
    assert hand_over(flights, "three") == [0]
    del flights[0]
    assert hand_over(flights, "three") == [1]
