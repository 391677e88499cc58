from __future__ import annotations

from engine.pace import TRIED_ROUNDS, Pace


def test_a_mode_that_is_named_stays() -> None:
    in_turns, ahead = Pace("sequential", 4, 2), Pace("async", 4, 2)
    assert (in_turns.ahead, in_turns.threads) == (False, 4)
    assert (ahead.ahead, ahead.threads) == (True, 2)
    assert not any(pace.observe(seconds) for pace in (in_turns, ahead) for seconds in [1.0, 0.1] * 50)


def decided(in_turns_s: float, ahead_s: float) -> Pace:
    pace = Pace("auto", 4, 2)
    for _ in range(2 * TRIED_ROUNDS):
        pace.observe(ahead_s if pace.ahead else in_turns_s)
    return pace


def test_auto_tries_both_and_stays_with_the_faster() -> None:
    assert decided(in_turns_s=0.03, ahead_s=0.02).ahead
    assert not decided(in_turns_s=0.02, ahead_s=0.03).ahead


def test_auto_drafts_ahead_only_for_a_clear_gain() -> None:
    assert not decided(in_turns_s=0.0200, ahead_s=0.0199).ahead


def test_once_decided_auto_tries_no_more() -> None:
    pace = decided(in_turns_s=0.03, ahead_s=0.02)
    assert not any(pace.observe(9.0) for _ in range(100))
    assert pace.ahead


def test_every_change_is_told() -> None:
    pace = Pace("auto", 4, 2)
    changes = [pace.observe(0.02 if not pace.ahead else 0.03) for _ in range(2 * TRIED_ROUNDS)]
    assert [at + 1 for at, changed in enumerate(changes) if changed] == [TRIED_ROUNDS, 2 * TRIED_ROUNDS]
