"""Tiny random models of whose layers only some have keys and values, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

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
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "shared_intermediate_size": 64,
    "num_local_experts": 0,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA | _LINEAR),
    "lfm2": ("Lfm2Config", _CONVOLUTIONS),
    "granite 4": ("GraniteMoeHybridConfig", _MAMBA | _LINEAR),
}
"""A class of configurations of each kind, and its options."""


def save_tiny_hybrid(folder: Path, kind: str, seed: int = 0) -> str:
    """Save a model of that kind, with the tiny tokenizer."""
    torch.manual_seed(seed)
    name, options = KINDS[kind]
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**_SIZES | options))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
