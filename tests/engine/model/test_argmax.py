from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.argmax import NAN, argmax

BITS = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=7, max_size=7), min_size=1, max_size=4)


def bfloat16(bits: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


@given(BITS)
def test_the_first_of_the_largest_is_found_and_nan_is_told_apart(bits: list[list[int]]) -> None:
    logits = bfloat16(bits)
    for row, found in zip(logits.float().tolist(), argmax(logits), strict=True):
        if any(x != x for x in row):
            assert found == NAN
        else:
            assert row[found] == max(row) and (max(row) == 0 or found == row.index(max(row)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_both_kinds_of_nan_are_found(dtype: torch.dtype, sign: int) -> None:
    logits = torch.randn(3, 50).to(dtype)
    logits[1, 7] = torch.copysign(torch.tensor(torch.nan), torch.tensor(float(sign)))
    assert [token == NAN for token in argmax(logits)] == [False, True, False]
