"""The heads again, written naively: one whole sequence at a time, no cache, no mask, no fused weights."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.drafters.conftest import HEADS, KV_HEADS


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rope(x: Tensor) -> Tensor:
    """Rotate x: [n, heads, head_dim] by its index."""
    n, half = x.shape[0], x.shape[-1] // 2
    angle = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def layer(weights: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor) -> Tensor:
    """Compute a causal Llama layer over the whole sequence, positions from 0."""
    n = len(x)

    def project(name: str, heads: int) -> Tensor:
        return (x @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T).view(n, heads, -1)

    query, key, value = rope(project("q", HEADS)), rope(project("k", KV_HEADS)), project("v", KV_HEADS)
    attended = torch.zeros_like(query)
    for head in range(HEADS):
        shared = head * KV_HEADS // HEADS
        for i in range(n):
            scores = key[: i + 1, shared] @ query[i, head] / query.shape[-1] ** 0.5
            attended[i, head] = scores.softmax(0) @ value[: i + 1, shared]
    x = residual + attended.reshape(n, -1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
    normed = rms(x, weights[f"{prefix}.post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(normed @ weights[f"{prefix}.mlp.gate_proj.weight"].T)
    return (
        x + (gate * (normed @ weights[f"{prefix}.mlp.up_proj.weight"].T)) @ weights[f"{prefix}.mlp.down_proj.weight"].T
    )


def eagle_features(weights: dict[str, Tensor], features: Tensor, tokens: list[int]) -> Tensor:
    """Return EAGLE-1's guessed features after each (feature, next token) pair."""
    embedded = weights["embed_tokens.weight"][tokens]
    x = torch.cat([embedded, features], -1) @ weights["fc.weight"].T + weights["fc.bias"]
    return layer(weights, "layers.0", x, x)


def eagle3_features(
    weights: dict[str, Tensor],
    embedding: Tensor,
    features: Tensor,
    tokens: list[int],
    norm_before_residual: bool = False,
) -> Tensor:
    embedded = rms(embedding[tokens], weights["midlayer.input_layernorm.weight"])
    normed = rms(features, weights["midlayer.hidden_norm.weight"])
    x = torch.cat([embedded, normed], -1)
    return layer(weights, "midlayer", x, normed if norm_before_residual else features)
