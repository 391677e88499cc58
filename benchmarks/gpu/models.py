"""Random models and heads, whose texts mean nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from engine.core.methods import METHODS

LLAMA_8B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    max_position_embeddings=32768, vocab_size=128256, rms_norm_eps=1e-5,
)  # fmt: skip
TOY = LlamaConfig(
    hidden_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
    max_position_embeddings=512, vocab_size=512,
)  # fmt: skip


def random_weight(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device) * shape[-1] ** -0.5


Layout = tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, Tensor]]
"""Its config.json, the shapes of its weights, and its tensors that are no weights."""


def _layer(c: LlamaConfig, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    hidden, kv = c.hidden_size, c.num_key_value_heads * c.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": (hidden, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (c.intermediate_size, hidden),
        f"{prefix}.mlp.up_proj.weight": (c.intermediate_size, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, c.intermediate_size),
    }


def _eagle3(c: LlamaConfig) -> Layout:
    hidden, vocab = c.hidden_size, c.vocab_size // 4
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        **_layer(c, "midlayer", 2 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    ids = {"d2t": torch.zeros(vocab, dtype=torch.long), "t2d": torch.arange(c.vocab_size) < vocab}
    return c.to_dict() | {"draft_vocab_size": vocab}, shapes, ids


def _eagle(c: LlamaConfig) -> Layout:
    hidden = c.hidden_size
    shapes = {
        "embed_tokens.weight": (c.vocab_size, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        **_layer(c, "layers.0", hidden),
    }
    return c.to_dict(), shapes, {}


def _block(c: LlamaConfig) -> Layout:
    """Return the layout of DFlash: five layers over blocks of 16."""
    hidden, count, read = c.hidden_size, 5, [1, c.num_hidden_layers // 2]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(read) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(count):
        shapes |= _layer(c, f"layers.{i}", hidden)
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (c.head_dim,) for name in ("q", "k")}
        shapes[f"layers.{i}.input_layernorm.weight"] = (hidden,)
    config = {
        **c.to_dict(), "model_type": "qwen3", "num_hidden_layers": count, "block_size": 16,
        "num_target_layers": c.num_hidden_layers,
        "dflash_config": {"target_layer_ids": read, "mask_token_id": c.vocab_size - 1},
    }  # fmt: skip
    return config, shapes, {}


def _medusa(c: LlamaConfig) -> Layout:
    hidden, count = c.hidden_size, 3
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        shapes |= {f"{i}.0.linear.weight": (hidden, hidden), f"{i}.0.linear.bias": (hidden,)}
        shapes[f"{i}.1.weight"] = (c.vocab_size, hidden)
    return {"medusa_num_heads": count, "medusa_num_layers": 1}, shapes, {}


def _hydra(c: LlamaConfig) -> Layout:
    hidden, count = c.hidden_size, 3
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{i}.0.{part}.weight"] = (hidden, (i + 2) * hidden)
            shapes[f"hydra_mlp.{i}.0.{part}.bias"] = (hidden,)
        shapes |= {f"hydra_mlp.{i}.1.linear.weight": (hidden, hidden), f"hydra_mlp.{i}.1.linear.bias": (hidden,)}
        shapes[f"hydra_lm_head.{i}.weight"] = (c.vocab_size, hidden)
    config = {"hydra_num_heads": count, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    return config, shapes, {}


def layout_of(method: str, target: LlamaConfig) -> Layout:
    """Return the layout of a head for a target of that configuration."""
    return _LAYOUTS[method](target)


def kind_of(method: str) -> Any:
    """Return a method's class of heads."""
    module, _, name = (METHODS[method].drafter or "").partition(":")
    return getattr(import_module(module), name)


_LAYOUTS = {"eagle3": _eagle3, "eagle": _eagle, "block": _block, "medusa": _medusa, "hydra": _hydra}
HEADS = tuple(_LAYOUTS)
