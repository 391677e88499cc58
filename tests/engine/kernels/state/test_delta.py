"""A gated delta net beside the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.state.delta import ChannelGates, GatedDelta
from tests.engine.kernels.state.delta_layer import delta_layer
from tests.engine.kernels.state.layer_run import HIDDEN, LayerRun, Matrix, rows

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 32, 48, 4
CHANNELS, MADE = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUE_HEADS * VALUE_DIM
TYPES = [torch.float32, torch.bfloat16]


def new_layer(dtype: torch.dtype, key_head_of: Sequence[int] = (0, 0, 1, 1)) -> GatedDelta:
    return delta_layer(dtype, key_head_of, KEY_DIM, VALUE_DIM, TAPS)


def new_channel_layer(dtype: torch.dtype) -> GatedDelta:
    """A layer each channel of whose keys decays by itself."""
    usual, rank = new_layer(dtype), 32
    keys, values = KEY_HEADS * KEY_DIM, KEY_HEADS * VALUE_DIM
    low = [Matrix((torch.randn(rank, HIDDEN) * 0.3).to(dtype)) for _ in range(2)]
    high = [Matrix((torch.randn(count, rank) * 0.3).to(dtype)) for count in (keys, values)]
    return replace(
        usual,
        inputs=Matrix((torch.randn(2 * keys + values, HIDDEN) * 0.3).to(dtype)),
        gates=Matrix((torch.randn(KEY_HEADS, HIDDEN) * 0.3).to(dtype)),
        out=Matrix(torch.randn(HIDDEN, values)),
        taps=usual.taps[:, : 2 * keys + values].contiguous(),
        decay=usual.decay[:KEY_HEADS].contiguous(),
        value_heads=KEY_HEADS,
        key_head_of=torch.arange(KEY_HEADS, dtype=torch.int32),
        by_channel=ChannelGates((low[0], high[0]), (low[1], high[1]), torch.randn(keys), rank),
    )


def by_formula(layer: GatedDelta, x: Tensor) -> Tensor:
    """[rows, values] float32: the definition, one row after the other."""
    inputs, gates, of_channels = layer.inputs(x).float(), layer.gates(x).float(), layer.by_channel
    channels, values = layer.taps.shape[1], layer.value_heads
    mixed, z = inputs[:, :channels], inputs[:, channels:]
    padded = torch.cat([torch.zeros(TAPS - 1, channels), mixed])
    mixed = F.silu(sum(layer.taps[tap] * padded[tap : tap + len(x)] for tap in range(TAPS)))
    q, k, v = mixed.split([KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, values * VALUE_DIM], dim=1)
    q, k = (F.normalize(part.view(-1, KEY_HEADS, KEY_DIM), dim=-1)[:, layer.key_head_of.long()] for part in (q, k))
    v, q, beta = v.view(-1, values, VALUE_DIM), q * KEY_DIM**-0.5, gates[:, :values].sigmoid()
    if of_channels is None:
        steps, gate = (gates[:, values:] + layer.dt_bias)[..., None], F.silu(z)
    else:
        (forget, forget_high), (low, high) = of_channels.forget, of_channels.out
        steps = (forget_high(forget(x)).float() + of_channels.forget_bias).view(-1, values, KEY_DIM)
        gate = high(low(x)).float().sigmoid()
    decay, gate = (layer.decay[:, None] * F.softplus(steps)).exp(), gate.view(-1, values, VALUE_DIM)
    state, found = torch.zeros(values, KEY_DIM, VALUE_DIM), []
    for row in range(len(x)):
        state = state * decay[row, :, :, None]
        delta = beta[row, :, None] * (v[row] - torch.einsum("hkv,hk->hv", state, k[row]))
        state = state + k[row, :, :, None] * delta[:, None]
        o = torch.einsum("hkv,hk->hv", state, q[row])
        found.append(F.rms_norm(o, (VALUE_DIM,), layer.norm, layer.epsilon) * gate[row])
    return torch.stack(found).flatten(1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("key_head_of", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_a_text_gives_what_the_formula_says(dtype: torch.dtype, key_head_of: Sequence[int]) -> None:
    layer, x = new_layer(dtype, key_head_of), rows(40, dtype)
    found = LayerRun(layer, HIDDEN, dtype).text(x, 0, 1)
    expected = by_formula(layer, x)
    assert (found.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max()


@pytest.mark.parametrize("dtype", TYPES)
def test_channels_that_decay_by_themselves_give_what_the_formula_says(dtype: torch.dtype) -> None:
    layer, x = new_channel_layer(dtype), rows(40, dtype)
    found = LayerRun(layer, HIDDEN, dtype).text(x, 0, 1)
    expected = by_formula(layer, x)
    assert (found.float() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * expected.abs().max()
