from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.pointwise import PointwiseOperations


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [F.silu, gelu, F.gelu, torch.tanh, torch.rsqrt, torch.relu, F.softplus])
def test_what_is_not_named_has_the_same_bits_in_every_row(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.rand(300, 100, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    with PointwiseOperations() as operations:
        whole = function(x)
    if operations.depending_on_place(1) is None:
        assert torch.equal(torch.cat([function(row[None]) for row in x]), whole)


def test_rows_of_whole_vectors_are_the_same_wherever_they_lie() -> None:
    with PointwiseOperations() as operations:
        F.silu(torch.randn(3, 128))
        gelu(torch.randn(3, 192))
    assert operations.depending_on_place(1) is None


def test_rows_must_be_whole_vectors_in_every_threads_share() -> None:
    with PointwiseOperations() as operations:
        F.silu(torch.randn(3, 192))
    if operations.depending_on_place(2) is None:
        pytest.skip("silu is the same bits everywhere here")
    assert operations.depending_on_place(2) == "silu over rows of 192"


def test_operations_on_two_arrays_are_not_its_business() -> None:
    with PointwiseOperations() as operations:
        torch.randn(3, 7) * torch.randn(3, 7) + torch.randn(3, 7)
    assert operations.depending_on_place(2) is None
