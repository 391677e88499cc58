"""A gated delta net beside the formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.state.delta import GatedDelta
from tests.engine.kernels.state.layer_run import HIDDEN, LayerRun, Matrix, rows

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 32, 48, 4
CHANNELS, MADE = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUE_HEADS * VALUE_DIM
TYPES = [torch.float32, torch.bfloat16]


def new_layer(dtype: torch.dtype, key_head_of: Sequence[int] = (0, 0, 1, 1)) -> GatedDelta:
    torch.manual_seed(0)
    return GatedDelta(
        inputs=Matrix((torch.randn(CHANNELS + MADE, HIDDEN) * 0.3).to(dtype)),
        gates=Matrix((torch.randn(2 * VALUE_HEADS, HIDDEN) * 0.3).to(dtype)),
        out=Matrix(torch.randn(HIDDEN, MADE)),
        taps=torch.randn(TAPS, CHANNELS) * 0.5,
        decay=-torch.rand(VALUE_HEADS) * 4,
        dt_bias=torch.randn(VALUE_HEADS),
        norm=torch.rand(VALUE_DIM) + 0.5,
        epsilon=1e-6,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        key_head_of=torch.tensor(key_head_of, dtype=torch.int32),
        width=dtype.itemsize,
    )


def by_formula(layer: GatedDelta, x: Tensor) -> Tensor:
    """[rows, MADE] float32: the definition, one row after the other."""
    inputs, gates = layer.inputs(x).float(), layer.gates(x).float()
    mixed, z = inputs[:, :CHANNELS], inputs[:, CHANNELS:].view(-1, VALUE_HEADS, VALUE_DIM)
    padded = torch.cat([torch.zeros(TAPS - 1, CHANNELS), mixed])
    mixed = F.silu(sum(layer.taps[tap] * padded[tap : tap + len(x)] for tap in range(TAPS)))
    q, k, v = mixed.split([KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, MADE], dim=1)
    q, k = (F.normalize(part.view(-1, KEY_HEADS, KEY_DIM), dim=-1)[:, layer.key_head_of.long()] for part in (q, k))
    v, q = v.view(-1, VALUE_HEADS, VALUE_DIM), q * KEY_DIM**-0.5
    beta, decay = (
        gates[:, :VALUE_HEADS].sigmoid(),
        (layer.decay * F.softplus(gates[:, VALUE_HEADS:] + layer.dt_bias)).exp(),
    )
    state, found = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM), []
    for row in range(len(x)):
        state = state * decay[row, :, None, None]
        delta = beta[row, :, None] * (v[row] - torch.einsum("hkv,hk->hv", state, k[row]))
        state = state + k[row, :, :, None] * delta[:, None]
        o = torch.einsum("hkv,hk->hv", state, q[row])
        found.append(F.rms_norm(o, (VALUE_DIM,), layer.norm, layer.epsilon) * F.silu(z[row]))
    return torch.stack(found).flatten(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("key_head_of", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_a_text_gives_what_the_formula_says(dtype: torch.dtype, key_head_of: Sequence[int]) -> None:
    layer, x = new_layer(dtype, key_head_of), rows(40, dtype)
    found = LayerRun(layer, HIDDEN, dtype).text(x, 0, 1)
    expected = by_formula(layer, x)
    assert (found.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max()
