from __future__ import annotations

import itertools

from engine.pace import FIRST_ROUNDS, TRIED_ROUNDS, TRIED_TURNS, Choice, Pace

TRIED = FIRST_ROUNDS + 2 * TRIED_TURNS * TRIED_ROUNDS


def test_a_mode_that_is_named_stays() -> None:
    in_turns, ahead = Pace("sequential", 4, 2), Pace("async", 4, 2)
    assert (in_turns.ahead, in_turns.threads) == (False, 4)
    assert (ahead.ahead, ahead.threads) == (True, 2)
    assert not any(pace.observe(1, seconds, 0.01) for pace in (in_turns, ahead) for seconds in [1.0, 0.1] * 50)


def decided(in_turns_s: float, ahead_s: float, tokens_ahead: int = 4) -> Pace:
    pace = Pace("auto", 4, 2)
    for _ in range(TRIED):
        pace.observe(tokens_ahead if pace.ahead else 4, ahead_s if pace.ahead else in_turns_s, 0.01)
    return pace


def test_auto_tries_both_and_stays_with_the_faster() -> None:
    assert decided(in_turns_s=0.03, ahead_s=0.02).ahead
    assert not decided(in_turns_s=0.02, ahead_s=0.03).ahead


def test_shorter_rounds_of_fewer_tokens_are_not_faster() -> None:
    assert not decided(in_turns_s=0.03, ahead_s=0.02, tokens_ahead=2).ahead


def test_auto_drafts_ahead_only_for_a_clear_gain() -> None:
    assert not decided(in_turns_s=0.0200, ahead_s=0.0199).ahead


def test_once_decided_auto_tries_no_more() -> None:
    pace = decided(in_turns_s=0.03, ahead_s=0.02)
    assert not any(pace.observe(1, 9.0, 0.01) for _ in range(100))
    assert pace.ahead


def test_the_modes_take_turns_and_every_change_is_told() -> None:
    pace = Pace("auto", 4, 2)
    changes = [pace.observe(4, 0.02 if not pace.ahead else 0.03, 0.01) for _ in range(TRIED)]
    assert [at + 1 for at, changed in enumerate(changes) if changed] == list(
        range(FIRST_ROUNDS + TRIED_ROUNDS, TRIED + 1, TRIED_ROUNDS)
    )


def test_where_drafts_are_hardly_waited_for_ahead_is_not_tried() -> None:
    pace = Pace("auto", 4, 2)
    assert not any(pace.observe(4, 0.020, 0.017) for _ in range(2 * TRIED))


def test_what_the_first_rounds_take_does_not_count() -> None:
    pace = Pace("auto", 4, 2)
    for round_ in range(TRIED):
        pace.observe(4, 0.9 if round_ < FIRST_ROUNDS else 0.020, 0.017)
    assert not any(pace.observe(4, 0.9, 0.017) for _ in range(TRIED))


def after(decisions: int, first: int, second: int) -> list[bool]:
    """What is decided when 100 ms bring so many tokens on the first and on the second way."""
    choice, decided = Choice(tried=8, retried=32, kept=0.98), []
    for _ in range(decisions):
        decided.append(choice.decide())
        choice.observe(second if choice.second else first, 0.1)
    return decided


def test_both_ways_are_tried_equally() -> None:
    assert sum(after(16, first=10, second=20)) == 8


def test_what_brings_more_tokens_a_second_is_done() -> None:
    assert sum(after(100, first=10, second=20)[16:]) > 75
    assert sum(after(100, first=20, second=10)[16:]) < 9


def test_the_other_way_is_tried_again_now_and_then() -> None:
    assert 0 < sum(after(200, first=20, second=10)[100:]) < 5


def test_a_trial_that_changes_nothing_is_repeated_ever_more_seldom() -> None:
    tried = [at for at, second in enumerate(after(600, first=20, second=10)) if second and at >= 16]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert gaps == sorted(gaps) and gaps[0] == 64 and gaps[-1] == 256


def test_when_the_better_way_changes_it_is_found() -> None:
    choice, gone = Choice(tried=8, retried=32, kept=0.98), []
    for at in range(2000):
        gone.append(choice.decide())
        choice.observe(20 if choice.second == (at >= 1000) else 10, 0.1)
    assert not any(gone[960:1000]) and sum(gone[1500:]) > 480
