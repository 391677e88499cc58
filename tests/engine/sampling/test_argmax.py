from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.argmax import NAN, _in_numpy, _in_torch, argmax

BITS = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=7, max_size=7), min_size=1, max_size=4)


def bfloat16(bits: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


@settings(deadline=None)  # the first call compiles
@given(BITS)
def test_the_first_of_the_largest_is_found_and_nan_is_told_apart(bits: list[list[int]]) -> None:
    logits = bfloat16(bits)
    for row, found in zip(logits.float().tolist(), argmax(logits), strict=True):
        if any(x != x for x in row):
            assert found == NAN
        else:
            assert row[found] == max(row) and found == row.index(max(row))


@pytest.mark.parametrize("way", [argmax, _in_numpy, _in_torch])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_way_finds_the_first_of_equals_and_tells_both_kinds_of_nan_from_infinity(
    way: Callable[[torch.Tensor], list[int]], dtype: torch.dtype
) -> None:
    logits = torch.zeros(6, 10, dtype=dtype)
    logits[1, 4], logits[2, 3], logits[3, :9] = torch.nan, torch.inf, -torch.inf
    logits[4, 4], logits[5, 6:8] = -torch.nan, 2.0
    assert way(logits) == [0, NAN, 3, 9, NAN, 6]


@pytest.mark.parametrize("way", [argmax, _in_numpy, _in_torch])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_way_takes_both_zeros_for_equals(way: Callable[[torch.Tensor], list[int]], dtype: torch.dtype) -> None:
    logits = torch.full((2, 10), -1.0, dtype=dtype)
    logits[0, 3], logits[0, 5] = -0.0, 0.0
    logits[1, 3], logits[1, 5] = 0.0, -0.0
    assert way(logits) == [3, 3]


@pytest.mark.parametrize("places", [(1023, 1024), (3000, 3001), (1024, 2048), (0, 2500)])
def test_rows_longer_than_a_part_are_searched_in_order(places: tuple[int, int]) -> None:
    logits = torch.randn(2, 3100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    logits[0, list(places)] = 40.0
    logits[1, places[1]] = 40.0
    assert argmax(logits) == [*places]


@pytest.mark.parametrize("place", [0, 1024, 3099])
def test_nan_is_found_in_every_part(place: int) -> None:
    logits = torch.randn(1, 3100, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    logits[0, place] = torch.nan
    assert argmax(logits) == [NAN]
