"""Which sections a report has."""

from __future__ import annotations

from benchmarks.figures import Row
from benchmarks.report import _sections
from benchmarks.runs import Run
from tests.benchmarks.test_figures import run_of


def titles(rows: list[Row]) -> list[str]:
    return [title for title, _ in _sections(Run(rows, [], [], []))]


def test_several_suites_are_summed_up_first_and_then_shown_one_by_one() -> None:
    rows = run_of({"1": 1.5}, "gsm8k") + run_of({"1": 1.2}, "sum")
    assert titles(rows) == ["One request, T = 0, all suites", "T = 0, gsm8k", "T = 0, sum"]


def test_one_suite_is_shown_once() -> None:
    assert titles(run_of({"1": 1.5, "2": 1.2}, "gsm8k")) == ["One request, T = 0, gsm8k"]
