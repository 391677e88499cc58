"""A random gated delta net."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.state.delta import GatedDelta
from tests.engine.kernels.state.layer_run import HIDDEN, Matrix


def delta_layer(dtype: torch.dtype, key_head_of: Sequence[int], key_dim: int, value_dim: int, taps: int) -> GatedDelta:
    """Return a net whose rows have this type. key_head_of: the key head of each value head."""
    key_heads, value_heads = max(key_head_of) + 1, len(key_head_of)
    made = value_heads * value_dim
    channels = 2 * key_heads * key_dim + made
    torch.manual_seed(0)
    return GatedDelta(
        inputs=Matrix((torch.randn(channels + made, HIDDEN) * 0.3).to(dtype)),
        gates=Matrix((torch.randn(2 * value_heads, HIDDEN) * 0.3).to(dtype)),
        out=Matrix(torch.randn(HIDDEN, made)),
        taps=torch.randn(taps, channels) * 0.5,
        decay=-torch.rand(value_heads) * 4,
        dt_bias=torch.randn(value_heads),
        norm=torch.rand(value_dim) + 0.5,
        epsilon=1e-6,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        key_head_of=torch.tensor(key_head_of, dtype=torch.int32),
        width=dtype.itemsize,
    )
