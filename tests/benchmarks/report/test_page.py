"""Which sections, pictures and sentences a report has."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.figures import BASELINE, Row
from benchmarks.report.headlines import one_request
from benchmarks.report.page import _draw, _sections
from benchmarks.report.runs import Run
from benchmarks.report.tree_plots import drafting
from tests.benchmarks.report.test_figures import run_of


def titles(rows: list[Row]) -> list[str]:
    return [title for title, _ in _sections(Run(rows, [], [], []))]


def test_several_suites_are_summed_up_first_and_then_shown_one_by_one() -> None:
    rows = run_of({"1": 1.5}, "gsm8k") + run_of({"1": 1.2}, "sum")
    assert titles(rows) == ["One request, T = 0, all suites", "T = 0, gsm8k", "T = 0, sum"]


def test_one_suite_is_shown_once() -> None:
    assert titles(run_of({"1": 1.5, "2": 1.2}, "gsm8k")) == ["One request, T = 0, gsm8k"]


def pictures(rows: list[Row], folder: Path) -> list[str]:
    names = [name for name, _ in _draw(Run(rows, [], [], []), folder)]
    assert sorted(names) == sorted(file.name for file in folder.iterdir())
    return names


def test_pictures_of_one_suite_show_nothing_twice(tmp_path: Path) -> None:
    rows = run_of({"1": 1.5, "2": 1.2}, "gsm8k")
    assert pictures(rows, tmp_path) == ["headline.png", "accepted.png", "cost.png", "trees.png"]


def test_suites_have_a_picture_where_there_are_several(tmp_path: Path) -> None:
    assert "suites.png" in pictures(run_of({"1": 1.5}, "gsm8k") + run_of({"1": 1.2}, "sum"), tmp_path)


def test_plain_decoding_has_no_trees_to_draw(tmp_path: Path) -> None:
    rows = [row for row in run_of({"1": 1.5}) if row.method == BASELINE]
    assert drafting(rows) == [] and drafting(run_of({"1": 1.5})) == ["pld"]
    assert pictures(rows, tmp_path) == ["headline.png", "cost.png"]


def test_the_best_and_the_worst_suite_are_named_where_there_are_several() -> None:
    one, two = run_of({"1": 1.5}, "gsm8k"), run_of({"1": 1.2}, "sum")
    assert not any("most on" in line for line in one_request(one))
    assert any("most on gsm8k (1.50), least on sum (1.20)" in line for line in one_request(one + two))
