"""Pictures are made of any figures that a run can have."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.report.figures import Summary
from benchmarks.report.speed_plots import _intervals


def summary(low: float, speed_up: float, high: float) -> Summary:
    values = dict.fromkeys(Summary.__struct_fields__, 0)
    return Summary(**values | {"low": low, "speed_up": speed_up, "high": high})


def test_error_bars_reach_from_the_median_to_both_ends() -> None:
    below, above = _intervals([summary(0.5, 1.5, 3.5), summary(1.0, 1.0, 1.0)])
    assert (below, above) == ([1.0, 0.0], [2.0, 0.0])


def test_a_bound_that_a_rounding_puts_beyond_the_median_has_no_bar(tmp_path: Path) -> None:
    one = 0.3596136668758016  # the interval of a single pair
    assert _intervals([summary(one, one + 1e-16, one)]) == [[pytest.approx(0.0)], [0.0]]
