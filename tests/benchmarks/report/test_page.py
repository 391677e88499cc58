"""Which sections and pictures a report has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("matplotlib")

from benchmarks.report.engine_figures import Turn
from benchmarks.report.figures import PLAIN, Row
from benchmarks.report.page import _draw, _sections
from benchmarks.report.plots import OURS, Bar, _errors
from benchmarks.report.runs import Run
from tests.benchmarks.report.test_figures import run_of


def titles(rows: list[Row]) -> list[str]:
    return [title for title, _ in _sections(Run(rows))]


TWO_SUITES, ONE = run_of({"1": 1.5}, "gsm8k") + run_of({"1": 1.2}, "sum"), run_of({"1": 1.5, "2": 1.2}, "gsm8k")


def test_several_suites_are_summed_up_first_and_then_shown_one_by_one_and_one_is_shown_once() -> None:
    assert titles(TWO_SUITES) == ["One request, T = 0, all suites", "T = 0, gsm8k", "T = 0, sum"]
    assert titles(ONE) == ["One request, T = 0, gsm8k"]


def pictures(run: Run, folder: Path) -> list[str]:
    names = [name for name, _ in _draw(run, folder)]
    assert sorted(names) == sorted(file.name for file in folder.iterdir())
    return names


def test_pictures_show_suites_where_there_are_several_and_nothing_twice(tmp_path: Path) -> None:
    plain = [msgspec.structs.replace(row, accepted={"1": 5}) for row in run_of({"1": 1.5}) if row.method == PLAIN]
    for name in ("plain", "one", "two"):
        (tmp_path / name).mkdir()
    assert pictures(Run(plain), tmp_path / "plain") == ["headline.png"]  # no rounds of several tokens
    assert pictures(Run(ONE), tmp_path / "one") == ["headline.png", "accepted.png"]
    assert "suites.png" in pictures(Run(TWO_SUITES), tmp_path / "two")


def test_other_engines_are_the_headline_where_they_were_measured(tmp_path: Path) -> None:
    turns = [
        Turn(name, "Q4_K", "int8", n, 0, 1.0, [9 * n], name == "none") for name in ("none", "other") for n in (1, 8)
    ]
    assert pictures(Run(run_of({"1": 1.5}), engines=turns), tmp_path)[:2] == ["headline.png", "speed-up.png"]


def test_error_bars_reach_from_the_value_to_both_ends_unless_a_rounding_puts_one_beyond() -> None:
    panel = [Bar("a", 1.5, 0.5, 3.5, OURS), Bar("b", 1.0, 1.0, 1.0, OURS)]
    assert _errors(panel) == [[1.0, 0.0], [2.0, 0.0]]
    one = 0.3596136668758016  # the interval of a single pair
    assert _errors([Bar("a", one + 1e-16, one, one, OURS)]) == [[pytest.approx(0.0)], [0.0]]
