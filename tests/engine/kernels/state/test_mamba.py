"""Mamba-2 beside the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.state.mamba import Mamba
from tests.engine.kernels.state.layer_run import HIDDEN, LayerRun, Matrix, rows

HEADS, GROUPS, HEAD_DIM, STATE_DIM, TAPS = 6, 2, 32, 48, 4
MADE, KEYS = HEADS * HEAD_DIM, GROUPS * STATE_DIM
CHANNELS = MADE + 2 * KEYS
TYPES = [torch.float32, torch.bfloat16]


def new_layer(dtype: torch.dtype = torch.float32) -> Mamba:
    torch.manual_seed(0)
    return Mamba(
        inputs=Matrix((torch.randn(MADE + CHANNELS + HEADS, HIDDEN) * 0.3).to(dtype)),
        out=Matrix(torch.randn(HIDDEN, MADE)),
        taps=torch.randn(TAPS, CHANNELS) * 0.5,
        bias=torch.randn(CHANNELS) * 0.5,
        decay=-torch.rand(HEADS) * 2,
        dt_bias=torch.randn(HEADS),
        skip=torch.randn(HEADS),
        norm=torch.rand(MADE) + 0.5,
        gate_last=False,
        epsilon=1e-5,
        heads=HEADS,
        groups=GROUPS,
        head_dim=HEAD_DIM,
        state_dim=STATE_DIM,
        steps=(0.0, float("inf")),
        width=dtype.itemsize,
    )


def by_formula(layer: Mamba, x: Tensor) -> Tensor:
    """[rows, MADE] float64: the definition, one row after the other."""
    inputs = torch.cat([layer.inputs(row[None]) for row in x]).double()
    z, mixed, steps = inputs.split([MADE, CHANNELS, HEADS], dim=1)
    padded = torch.cat([torch.zeros(TAPS - 1, CHANNELS), mixed])
    taps = layer.taps.double()
    mixed = F.silu(sum(taps[tap] * padded[tap : tap + len(x)] for tap in range(TAPS)) + layer.bias)
    values, keys, queries = mixed.split([MADE, KEYS, KEYS], dim=1)
    values = values.view(-1, HEADS, HEAD_DIM)
    keys, queries = (
        one.view(-1, GROUPS, STATE_DIM).repeat_interleave(HEADS // GROUPS, dim=1) for one in (keys, queries)
    )
    dt = F.softplus(steps + layer.dt_bias).clamp(*layer.steps)
    kept = (layer.decay.double() * dt).exp()
    state, found = torch.zeros(HEADS, STATE_DIM, HEAD_DIM, dtype=torch.float64), []
    for row in range(len(x)):
        written = keys[row, :, :, None] * (dt[row, :, None] * values[row])[:, None]
        state = state * kept[row, :, None, None] + written
        y = torch.einsum("hnp,hn->hp", state, queries[row]) + layer.skip.double()[:, None] * values[row]
        found.append(gated(layer, y.flatten(), z[row]))
    return torch.stack(found)


def gated(layer: Mamba, y: Tensor, z: Tensor) -> Tensor:
    y = y if layer.gate_last else y * F.silu(z)
    if layer.norm is not None:
        y = F.rms_norm(y.view(GROUPS, -1), (MADE // GROUPS,), eps=layer.epsilon).flatten() * layer.norm
    return y * F.silu(z) if layer.gate_last else y


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate_last", [False, True], ids=["the gate first", "the norm first"])
@pytest.mark.parametrize("normed", [True, False], ids=["a norm", "no norm"])
@pytest.mark.parametrize("steps", [(0.0, float("inf")), (0.5, 1.0)], ids=["any step", "steps within limits"])
def test_a_text_gives_what_the_formula_says(
    dtype: torch.dtype, gate_last: bool, normed: bool, steps: tuple[float, float]
) -> None:
    layer, x = replace(new_layer(dtype), gate_last=gate_last, steps=steps), rows(40, dtype)
    layer = layer if normed else replace(layer, norm=None)
    found = LayerRun(layer, HIDDEN, dtype).text(x, 0, 1)
    expected = by_formula(layer, x)
    assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.abs().max()
