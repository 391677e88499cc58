"""What a new head gains over what there was, from the rows of all that are compared."""

from __future__ import annotations

import pytest

from benchmarks.report.figures import Row
from benchmarks.tuning import measuring
from benchmarks.tuning.measuring import NEW, OLD, Gain
from tests.benchmarks.report.test_figures import row


def rows_of(seconds: dict[str, float]) -> list[Row]:
    return [row(name, str(prompt), s * (1 + 0.01 * prompt)) for prompt in range(8) for name, s in seconds.items()]


def test_a_head_pays_if_it_is_surely_faster_than_the_best_of_the_others() -> None:
    gain = Gain.of(rows_of({"none": 4.0, "suffix": 2.0, NEW: 1.6, OLD: 3.0}))
    assert (gain.other, gain.pays, gain.prompts) == ("suffix", True, 8)
    assert (gain.ratio, gain.plain) == (pytest.approx(1.25), pytest.approx(2.5))
    assert str(gain) == "1.25x as fast as suffix (95%: 1.25 to 1.25), 2.50x plain decoding, 8 prompts"
    assert not Gain.of(rows_of({"none": 4.0, "suffix": 2.0, NEW: 1.6, OLD: 1.5})).pays
    assert not Gain.of(rows_of({"none": 1.0, "suffix": 2.0, NEW: 1.0})).pays
    chance = [row(name, str(n), s) for n in range(8) for name, s in (("none", 2.0), (NEW, 1.7 if n < 5 else 2.6))]
    assert (gain := Gain.of(chance)).ratio > 1.1 and gain.low < 1 and not gain.pays


def test_rows_are_counted_of_the_prompts_that_all_who_are_compared_have_answered() -> None:
    before = rows_of({"none": 4.0, "suffix": 2.0, NEW: 1.6, "left out since": 1.0})
    left = [one for one in before if (one.method, one.question_id) != ("suffix", "3")]
    found = measuring._answered_by_all(left, ["none", "suffix", NEW])
    assert {one.method for one in found} == {"none", "suffix", NEW}
    assert {one.question_id for one in found} == set("0124567") and len(found) == 3 * 7
    assert measuring._answered_by_all(left, ["none", "suffix", NEW, OLD]) == []
