"""What runs of a grid by default."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.grids import pairs


def run(mark: pytest.MarkDecorator) -> list[tuple[Any, ...]]:
    """Return the combinations that run by default."""
    return [tuple(param.values) for param in mark.args[1] if not {one.name for one in param.marks} & {"slow", "skipif"}]


def test_every_pair_of_values_runs_and_the_whole_grid_is_there() -> None:
    grid: dict[str, Any] = {"a": range(7), "b": range(6), "c": [True, False], "d": "xy"}
    mark = pairs(**grid)
    assert len(mark.args[1]) == 7 * 6 * 2 * 2
    found = run(mark)
    for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        both = {(one[i], one[j]) for one in found}
        assert both == {*product([*grid.values()][i], [*grid.values()][j])}
    assert len(found) <= 7 * 6 + 4


def test_what_a_machine_skips_stands_for_no_pair() -> None:
    absent = pytest.param("absent", marks=pytest.mark.skipif(True, reason="not on this machine"))
    found = run(pairs(kernel=["here", absent], rows=range(5), threads=[1, 2]))
    assert {one[1:] for one in found if one[0] == "here"} == {*product(range(5), [1, 2])}


def test_the_same_combinations_run_every_time() -> None:
    assert run(pairs(a=range(9), b=range(9), c=range(3))) == run(pairs(a=range(9), b=range(9), c=range(3)))
