"""The pieces that heads compute with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from drafters.layers import Linear
from engine.model.matmul import units
from engine.model.quantised import Form

paired = pytest.mark.skipif(not units() or not units()[0].paired, reason="this processor does not multiply bfloat16")


@paired
@pytest.mark.parametrize("gated", [False, True])
def test_matrices_of_heads_are_kept_in_eight_bits(gated: bool) -> None:
    drawn = torch.Generator().manual_seed(4)
    weight, x = (torch.randn(n, 96, generator=drawn).bfloat16() for n in (64, 5))
    linear = Linear(weight, gated=gated)
    assert linear.matmul is not None and linear.matmul.form is Form.EIGHT
    out = F.linear(x.float(), weight.float())
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    missed = (linear(x).float() - out).norm() / out.norm()
    assert missed < 0.02


@paired
def test_a_matrix_that_does_not_split_into_blocks_is_kept_as_it_is() -> None:
    weight, x = torch.randn(40, 96).bfloat16(), torch.randn(3, 96).bfloat16()
    linear = Linear(weight)
    assert linear.matmul is not None and linear.matmul.form is Form.BFLOAT16
    torch.testing.assert_close(linear(x), F.linear(x.float(), weight.float()).bfloat16())
