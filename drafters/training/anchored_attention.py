"""Attention from the anchors of a text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


class AnchoredAttention(nn.Module):
    """Attention of training-time test: step k of an anchor sees the true rows up to the anchor and its own guesses."""

    def __init__(self, config: LlamaConfig, inputs: int):
        super().__init__()
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or self.heads
        self.head_dim: int = config.head_dim or config.hidden_size // self.heads
        biased: bool = getattr(config, "qkv_bias", False)
        self.q_proj = nn.Linear(inputs, self.heads * self.head_dim, bias=biased)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=biased)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=biased)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [batch, heads, n, head_dim]. x: [batch, n, inputs]; positions: [batch or 1, n]."""
        groups = self.heads // self.kv_heads
        key, value = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        cos, sin = self.rotary(x, positions)
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
        return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)

    def forward(
        self, x: Tensor, anchors: Tensor, true: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attend. x: [batch, anchors, inputs] of step len(own). true: `keys` of all rows; own: of the anchors' steps
        from 1.
        """
        cos, sin = self.rotary(x, anchors + len(own))
        query = self._split(self.q_proj(x))
        query, _ = apply_rotary_pos_emb(query, query, cos, sin)
        keys, values = true
        rows = torch.arange(keys.shape[2], device=x.device)
        hidden = rows > anchors[:, None, :, None]
        scores = (query @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        guessed = [(query * key).sum(-1, keepdim=True) for key, _ in own]
        weight = (torch.cat([scores, *guessed], dim=-1).float() * self.head_dim**-0.5).softmax(-1).to(values.dtype)
        attended = weight[..., : len(rows)] @ values
        for index, (_, value) in enumerate(own):
            attended = attended + weight[..., len(rows) + index, None] * value
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """Reshape [batch, n, heads * head_dim] to [batch, heads, n, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
