"""Matrices of draft heads, rounded to codes of 8 bits."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.quant.nearest import nearest, nearest_codes, values_of


def test_the_nearest_codes_miss_a_matrix_by_half_a_step_at_most() -> None:
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    matrix[5, 32:64] = 0  # a block without a scale
    found = nearest(matrix)
    assert found.kind == "Q8_0"
    step = matrix.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    missed = (found.values().float() - matrix.float()).unflatten(1, (-1, 32)).abs()
    rounded = matrix.float().abs().unflatten(1, (-1, 32)) / 256  # to bfloat16
    assert (missed <= 0.51 * step + rounded).all() and found.values()[5, 32:64].eq(0).all()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_small_numbers_are_as_near(size: float) -> None:
    matrix = (size * torch.randn(32, 64, generator=torch.Generator().manual_seed(3))).bfloat16()
    for values in (nearest(matrix).values(), values_of(*nearest_codes(matrix))):
        assert (values.float() - matrix.float()).norm() < 0.01 * matrix.float().norm()


def test_codes_and_scales_have_the_values_of_the_blocks() -> None:
    matrix = torch.randn(16, 64)
    assert torch.equal(values_of(*nearest_codes(matrix)), nearest(matrix).values())


def test_scales_that_do_not_match_their_codes_are_refused() -> None:
    codes, scales = nearest_codes(torch.randn(16, 64))
    with pytest.raises(ValueError, match="do not match"):
        values_of(codes, scales[:, :1])
