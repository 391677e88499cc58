"""Tiny random models of whose layers only some have keys and values, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.conftest import VOCABULARY, tiny_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KINDS = ("qwen3.5", "lfm2")


def save_tiny_hybrid(folder: Path, kind: str, seed: int = 0) -> str:
    """Save a model of that kind, with the tiny tokenizer."""
    torch.manual_seed(seed)
    if kind == "lfm2":
        types = ["conv", "full_attention", "conv"]
        model: Any = Lfm2ForCausalLM(Lfm2Config(**_SIZES, layer_types=types, block_auto_adjust_ff_dim=False))
    else:
        types = ["linear_attention", "full_attention", "linear_attention"]
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_SIZES, **_DELTA, layer_types=types))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
