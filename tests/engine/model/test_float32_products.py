"""Products of the stock forward through float32 are torch's own, up to the order of the sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.trial import float32_products
from engine.model.trial.float32_products import Float32Products


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """A sum that lies between two numbers may be rounded to either, if it is near the middle."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01 + 1e-5).all()


@pytest.mark.parametrize("rows", [(1,), (2, 9), (40,)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer(rows: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_products, "_AT_ONCE", 64 * 7)  # the last part is smaller
    x, weight, bias = numbers(*rows, 64), numbers(50, 64), numbers(50) if biased else None
    with Float32Products():
        found = F.linear(x, weight, bias)
    exact = x.double() @ weight.double().T
    assert_rounded_once(found, exact if bias is None else exact + bias.double())


@pytest.mark.parametrize("ends", [[30, 30, 42, 64], [3, 9, 10, 64]])
def test_experts_that_are_grouped(ends: list[int]) -> None:
    x, weight = numbers(64, 32), numbers(4, 48, 32).transpose(1, 2)
    with Float32Products():
        found = F.grouped_mm(x, weight, offs=torch.tensor(ends, dtype=torch.int32))
    starts = [0, *ends]
    assert_rounded_once(
        found, torch.cat([x[starts[i] : ends[i]].double() @ weight[i].double() for i in range(len(ends))])
    )


def test_other_types_are_left_to_torch() -> None:
    x, weight = torch.randn(20, 8), torch.randn(4, 8)
    with Float32Products():
        assert torch.equal(F.linear(x, weight), x @ weight.T)
