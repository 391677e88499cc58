from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report.figures import (
    Row,
    Summary,
    loops,
    ratios,
    speed_tables,
    speed_ups,
    summaries,
    without_loops,
)
from benchmarks.report.ratios import agreements, compared, interval
from engine.core.errors import ConfigError


def row(method: str, question: str, seconds: float, **fields: Any) -> Row:
    values: dict[str, Any] = {
        "suite": "s", "temperature": 0.0, "repeat": 0, "tokens": 10, "rounds": 5, "mean_accepted_tokens": 2.0,
        "time_to_first_token_s": 0.1, "verifier_busy": 0.9, "draft_hit_rate": 0.0, "output_equal": True,
        "loops": False, "round_ms_p50": 1.0, "round_ms_p95": 2.0, "verify_ms": 1.0, "draft_ms": 0.0, "nodes": 4.0,
        "accepted": {"2": 5},
    }  # fmt: skip
    return Row(method=method, question_id=question, seconds=seconds, **values | fields)


def test_a_speed_up_compares_the_same_prompt_of_the_same_repeat() -> None:
    rows = [row("none", "a", 2.0), row("pld", "a", 1.0), row("none", "b", 8.0), row("pld", "b", 2.0)]
    rows += [row("none", "a", 4.0, repeat=1), row("pld", "a", 1.0, repeat=1)]
    assert speed_ups(rows, "pld") == [3.0, 4.0]


def test_repeats_of_the_same_prompts_make_no_interval_narrower() -> None:
    once = run_of({"a": 0.9, "b": 1.0, "c": 1.1, "d": 1.2, "e": 1.3, "f": 1.8})
    often = [msgspec.structs.replace(one, repeat=repeat) for repeat in range(10) for one in once]
    one, other = Summary("pld", once), Summary("pld", often)
    assert (one.speed_up, one.low, one.high) == (other.speed_up, other.low, other.high)
    assert ratios(often) == ratios(once)


def test_the_summary_speed_up_is_the_median_of_ratios_not_the_ratio_of_means() -> None:
    rows = [r for i, s in enumerate((1.0, 1.0, 100.0)) for r in (row("none", str(i), s), row("pld", str(i), s / 3))]
    rows[-1] = row("pld", "2", 1.0)
    pld, plain = summaries(rows)
    assert (plain.method, plain.speed_up) == ("none", 1.0)
    assert pld.speed_up == pytest.approx(3.0)


def test_decoding_is_compared_from_the_first_token_on() -> None:
    rows = [
        row(method, "a", seconds, tokens=11, time_to_first_token_s=4.0) for method, seconds in (("none", 8), ("pld", 6))
    ]
    pld, _ = summaries(rows)
    assert pld.speed_up == pytest.approx(8 / 6) and pld.decoding == pytest.approx(2.0)


def test_decoding_is_unknown_without_the_time_of_a_first_token_or_a_second_token() -> None:
    silent = [row("none", "a", 2.0), row("hf-assisted", "a", 1.0, time_to_first_token_s=None)]
    short = [row("none", "a", 2.0, tokens=1), row("pld", "a", 1.0, tokens=1)]
    assert [one.decoding for rows in (silent, short) for one in summaries(rows) if one.method != "none"] == [None, None]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_lies_within_the_values(values: list[float]) -> None:
    low, high = interval(values)
    middle = sorted(values)[len(values) // 2]
    assert min(values) <= low <= high <= max(values)
    assert low <= middle or len(values) % 2 == 0


def test_an_answer_loops_if_eight_tokens_come_more_than_four_times() -> None:
    assert loops([1, 2, 3, 4, 5, 6, 7, 8] * 5)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 8] * 4)
    assert not loops(list(range(200)))
    assert loops([9] * 12)


def test_prompts_whose_plain_answer_loops_are_left_out_for_everybody() -> None:
    rows = [row("none", "a", 1.0, loops=True), row("pld", "a", 1.0), row("none", "b", 1.0), row("pld", "b", 1.0)]
    assert [(r.method, r.question_id) for r in without_loops(rows)] == [("none", "b"), ("pld", "b")]


def test_what_a_contestant_does_not_tell_stays_unknown() -> None:
    rows = [row("none", "a", 1.0), row("hf", "a", 1.0, accepted={}, output_equal=None)]
    line = Summary("hf", rows)
    assert line.mean_accepted_tokens is None and line.same_text == "-"


def test_a_tie_is_counted_apart_from_equal_texts() -> None:
    rows = [row("none", "a", 1.0), row("none", "b", 1.0)]
    rows += [row("pld", "a", 1.0), row("pld", "b", 1.0, output_equal=False, tie=True)]
    assert Summary("pld", rows).same_text == "1/2, 1 tied"


def test_suites_count_the_same_however_often_they_are_asked() -> None:
    rows = [row("none", str(i), 4.0) for i in range(9)] + [row("pld", str(i), 1.0) for i in range(9)]
    rows += [row("none", "a", 4.0, suite="t"), row("pld", "a", 4.0, suite="t", accepted={"4": 1})]
    pld = Summary("pld", rows)
    assert pld.speed_up == pytest.approx(2.0) and pld.low == pytest.approx(pld.high)
    assert pld.mean_accepted_tokens == 3.0


def test_tokens_a_round_are_of_all_rounds_not_of_all_answers() -> None:
    rows = [row("none", "a", 1.0, accepted={"1": 30}), row("none", "b", 1.0, accepted={"1": 30})]
    rows += [row("pld", "a", 1.0, accepted={"30": 1}), row("pld", "b", 1.0, accepted={"1": 28, "2": 1})]
    assert Summary("pld", rows).mean_accepted_tokens == 60 / 30


def run_of(speed_ups: dict[str, float], suite: str = "s") -> list[Row]:
    return [
        r
        for question, ratio in speed_ups.items()
        for r in (row("none", question, 1.0, suite=suite), row("pld", question, 1 / ratio, suite=suite))
    ]


def test_what_is_printed_has_a_table_of_the_first_turns_for_each_temperature() -> None:
    warm = [msgspec.structs.replace(one, temperature=1.0) for one in run_of({"a": 1.5})]
    later = [msgspec.structs.replace(one, turn=2) for one in run_of({"a": 9.0}, "s, turn 2")]
    tables = speed_tables([*warm, *run_of({"a": 2.0}), *later])
    assert [table.title for table in tables] == ["All answers, T = 0", "All answers, T = 1"]
    assert [[line[2] for line in table.rows] for table in tables] == [["2.00x", "1.00x"], ["1.50x", "1.00x"]]


def test_two_runs_are_compared_over_the_prompts_that_both_have_the_furthest_apart_first() -> None:
    one = run_of({"a": 1.0, "b": 9.0}) + run_of({"a": 2.0}, "t")
    other = run_of({"a": 1.0, "c": 5.0}) + run_of({"a": 4.0}, "t") + run_of({"a": 7.0}, "only there")
    pairs = agreements(ratios(one), ratios(other))
    assert [(pair.where, pair.difference) for pair in pairs] == [
        (("T = 0", "t", "pld"), 0.5), (("T = 0", "s", "pld"), 0.0)
    ]  # fmt: skip


def test_a_cell_changed_if_its_quotients_lie_beyond_noise() -> None:
    before = {str(i): 1.0 + i / 10 for i in range(5)}
    noisy = {question: ratio * (1.04 if int(question) % 2 else 0.96) for question, ratio in before.items()}
    faster = {question: 1.1 * ratio for question, ratio in before.items()}
    for now, changed in ((noisy, False), (faster, True)):
        assert [pair.changed for pair in agreements(ratios(run_of(now)), ratios(run_of(before)))] == [changed]
    told = list(compared(ratios(run_of(faster)), ratios(run_of(before)), Path("before")))
    assert told[0].startswith("0% of 1 ratios agree within 5%") and "1 ratios changed" in told[2] and "+10%" in told[3]
    with pytest.raises(ConfigError, match="against=before"):
        list(compared(ratios(run_of(before)), {}, Path("before")))
