from __future__ import annotations

from engine.pace import TRIED_MISSES, TRIED_ROUNDS, TRIED_TURNS, MissPolicy, Pace

TRIED = 2 * TRIED_TURNS * TRIED_ROUNDS


def test_a_mode_that_is_named_stays() -> None:
    in_turns, ahead = Pace("sequential", 4, 2), Pace("async", 4, 2)
    assert (in_turns.ahead, in_turns.threads) == (False, 4)
    assert (ahead.ahead, ahead.threads) == (True, 2)
    assert not any(pace.observe(1, seconds) for pace in (in_turns, ahead) for seconds in [1.0, 0.1] * 50)


def decided(in_turns_s: float, ahead_s: float, tokens_ahead: int = 4) -> Pace:
    pace = Pace("auto", 4, 2)
    for _ in range(TRIED):
        pace.observe(tokens_ahead if pace.ahead else 4, ahead_s if pace.ahead else in_turns_s)
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
    assert not any(pace.observe(1, 9.0) for _ in range(100))
    assert pace.ahead


def test_the_modes_take_turns_and_every_change_is_told() -> None:
    pace = Pace("auto", 4, 2)
    changes = [pace.observe(4, 0.02 if not pace.ahead else 0.03) for _ in range(TRIED)]
    assert [at + 1 for at, changed in enumerate(changes) if changed] == list(
        range(TRIED_ROUNDS, TRIED + 1, TRIED_ROUNDS)
    )


def after(misses: int, alone_rate: float, waiting_rate: float) -> list[bool]:
    """The decisions of so many misses, when 100 ms bring that many tokens."""
    policy, decisions = MissPolicy(), []
    for _ in range(misses):
        decisions.append(policy.decide())
        policy.observe(int(alone_rate if policy.alone else waiting_rate), 0.1)
    return decisions


def test_after_a_miss_what_brings_more_tokens_a_second_is_done() -> None:
    assert sum(after(100, alone_rate=20, waiting_rate=10)[2 * TRIED_MISSES :]) > 75
    assert sum(after(100, alone_rate=10, waiting_rate=20)[2 * TRIED_MISSES :]) < 9


def test_the_other_way_is_tried_again_now_and_then() -> None:
    late = after(200, alone_rate=10, waiting_rate=20)[100:]
    assert 0 < sum(late) < 5
