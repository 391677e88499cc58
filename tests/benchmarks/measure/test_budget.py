from __future__ import annotations

from collections import Counter

from benchmarks.measure.budget import LEAST, Budget, is_narrow, spend
from benchmarks.report.figures import speed_ups
from tests.benchmarks.report.test_figures import row

SUITES = {"sure": [*range(30)], "noisy": [*range(30)]}
WIDE = {"none": [1.0] * LEAST, "a": [1.0, 2.0, 3.0, 4.0], "b": [2.0] * LEAST}
NARROW = {"none": [1.0] * LEAST, "a": [2.0] * LEAST, "b": [2.0] * LEAST}


def test_without_a_budget_everything_is_asked_in_turns_and_nobody_rests() -> None:
    asked = [
        (suite, resting) for suite, _, resting in spend({"s": [1, 2, 3], "t": [1]}, lambda _: NARROW, Budget(None))
    ]
    assert asked == [("s", set()), ("t", set()), ("s", set()), ("s", set())]


def test_a_budget_is_spent_where_the_interval_is_wide_and_only_on_whom_it_is_wide_for() -> None:
    turns = list(spend(SUITES, lambda suite: WIDE if suite == "noisy" else NARROW, Budget(9.0)))
    assert Counter(suite for suite, _, _ in turns) == {"sure": LEAST, "noisy": 30}
    assert turns[-1][2] == {"none", "b"}


def test_a_budget_that_is_spent_still_asks_every_suite_once() -> None:
    assert [suite for suite, _, _ in spend(SUITES, lambda _: WIDE, Budget(0.0))] == ["sure", "noisy"]


def test_an_interval_over_few_prompts_is_not_narrow_however_often_they_were_asked() -> None:
    asked = [(str(question), repeat) for question in range(LEAST) for repeat in range(LEAST)]
    rows = [row(name, question, 1.0, repeat=repeat) for question, repeat in asked for name in ("none", "pld")]
    few = [one for one in rows if one.question_id != "0"]
    assert [is_narrow(speed_ups(some, "pld")) for some in (rows, few)] == [True, False]


def test_shares_are_even_parts_of_what_is_left() -> None:
    assert Budget(0.0).share(3).spent and not Budget(9.0).share(3).spent and not Budget(None).share(2).bounded
