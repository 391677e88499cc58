from __future__ import annotations

import itertools

import pytest

from engine.costs.bandit import TwoOptionTrial
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime

TRIALS = 6  # blocks, three of each way


def gone(rounds: int, first: float, second: float, **options: float) -> list[bool]:
    """Which way each round goes if a second brings so much on the first and on the second way."""
    choice, ways = TwoOptionTrial(4, **options), []  # type: ignore[arg-type]
    for _ in range(rounds):
        ways.append(choice.second)
        choice.observe(second if choice.second else first, 1.0)
    return ways


def blocks(ways: list[bool]) -> list[bool]:
    return ways[::4]


def test_both_ways_are_tried_equally_and_in_turns() -> None:
    assert blocks(gone(4 * TRIALS, 10, 20)) == [False, True] * 3


def test_what_brings_more_is_done() -> None:
    assert sum(blocks(gone(400, 10, 20))[TRIALS:]) > 85
    assert sum(blocks(gone(400, 20, 10))[TRIALS:]) < 9


def test_the_second_way_may_have_to_be_clearly_better() -> None:
    assert not any(blocks(gone(80, 10, 10.2, gain=0.97))[TRIALS:])
    assert all(blocks(gone(80, 10, 10.4, gain=0.97))[TRIALS:])


def test_a_trial_that_changes_nothing_is_repeated_ever_more_seldom() -> None:
    tried = [at for at, second in enumerate(blocks(gone(2400, 20, 10))) if second and at >= TRIALS]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert gaps == sorted(gaps) and gaps[0] == 32 and gaps[-1] == 128


def test_when_the_better_way_changes_it_is_found() -> None:
    choice, ways = TwoOptionTrial(4), []
    for at in range(8000):
        ways.append(choice.second)
        choice.observe(20 if choice.second == (at >= 4000) else 10, 1.0)
    assert not any(ways[3936:4000]) and sum(ways[6000:]) > 1900


def test_the_first_rounds_and_the_first_of_every_block_do_not_count() -> None:
    choice = TwoOptionTrial(4, first=10)
    for at in range(10 + 4 * TRIALS):
        slow = at < 10 or (at - 10) % 4 == 0
        choice.observe(1.0, 100.0 if slow and choice.second else 1.0 if choice.second else 2.0)
    assert choice.second


def test_every_change_is_told_and_a_way_that_is_settled_stays() -> None:
    choice = TwoOptionTrial(4)
    assert [choice.observe(1.0, 1.0) for _ in range(8)] == [False] * 3 + [True] + [False] * 3 + [True]
    for second in (False, True):
        choice = TwoOptionTrial(4, second=second, settled=True)
        assert not any(choice.observe(1.0, 1.0 + 9 * second) for _ in range(200)) and choice.second == second


@pytest.mark.parametrize(("mode", "ahead"), [("sequential", False), ("async", True)])
def test_a_mode_that_is_named_stays(mode: str, ahead: bool) -> None:
    model = CostModel(ForwardTime({1: 0.010}), mode=mode)
    for at in range(400):
        model.observe_round(1, 1, 1, 0.02)
        model.observe_mode(1, 1, 0.03 if at % 2 else 9.0)
    assert model.drafting_ahead == ahead


def automatic(in_turns_s: float, ahead_s: float, around_s: float = 0.02, requests: int = 1) -> CostModel:
    """A model that has compared the modes. around_s: of a round, outside of the forward."""
    model = CostModel(ForwardTime({1: 0.010, 8: 0.020}), mode="auto")
    for _ in range(24 + 16 * TRIALS + 8):
        model.observe_round(requests, requests, requests, around_s)
        model.observe_mode(requests, 4 * requests, ahead_s if model.drafting_ahead else in_turns_s)
    return model


@pytest.mark.parametrize("requests", [1, 8])
def test_auto_stays_with_the_faster_mode(requests: int) -> None:
    assert automatic(0.03, 0.02, requests=requests).drafting_ahead
    assert not automatic(0.02, 0.03, requests=requests).drafting_ahead
    assert not automatic(0.0200, 0.0199, requests=requests).drafting_ahead, "only for a clear gain"
