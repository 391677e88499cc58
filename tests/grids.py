"""Grids of parameters: what a grid's every combination would see, seen by few of them.

A fault of a kernel shows for a value of one parameter (a number of rows, say), or where two meet; one that takes three
is rare. So of a grid those combinations run in which every pair of values occurs, and the first and last of all; the
others are marked slow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

_SEED = 1
_Param = type(pytest.param(None))


def pairs(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Return the mark that parametrises a test by a grid of which each pair of values runs.

    axes: a parameter's values, or `pytest.param` of one value. What is skipped here counts for no pair. A name that is
    also a fixture's replaces the fixture's own parameters.
    """
    named = {name: [_param(value) for value in values] for name, values in axes.items()}
    grid = [*product(*(range(len(values)) for values in named.values()))]
    runs = [place for place in grid if not any(map(_is_skipped, _values(named, place)))]
    chosen = {*_cover(runs), *runs[:1], *runs[-1:]}
    return pytest.mark.parametrize(
        tuple(named),
        [
            pytest.param(
                *(param.values[0] for param in values),
                id="-".join(_id(param) for param in values),
                marks=[mark for param in values for mark in param.marks] + [pytest.mark.slow] * (place not in chosen),
            )
            for place in grid
            for values in [_values(named, place)]
        ],
    )


def _cover(grid: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return combinations in which every pair occurs that occurs in the grid: always the one that adds most."""
    order = [*grid]
    random.Random(_SEED).shuffle(order)
    left = {pair for place in order for pair in _pairs_of(place)}
    chosen = []
    while left:
        best = max(order, key=lambda place: len(left & _pairs_of(place)))
        chosen.append(best)
        left -= _pairs_of(best)
    return chosen


def _pairs_of(place: tuple[int, ...]) -> frozenset[tuple[tuple[int, int], ...]]:
    return frozenset(combinations(enumerate(place), 2))


def _values(named: dict[str, list[Any]], place: tuple[int, ...]) -> list[Any]:
    return [values[index] for values, index in zip(named.values(), place, strict=True)]


def _param(value: Any) -> Any:
    return value if isinstance(value, _Param) else pytest.param(value)


def _is_skipped(param: Any) -> bool:
    return any(mark.name == "skip" or (mark.name == "skipif" and mark.args[0]) for mark in param.marks)


def _id(param: Any) -> str:
    value = param.values[0]
    return param.id or getattr(value, "name", None) or str(value).replace("torch.", "")
