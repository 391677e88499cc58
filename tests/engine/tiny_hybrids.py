"""Tiny random models of whose layers only some have keys and values, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.conftest import TINY, tiny_tokenizer

_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_expand": 1,
    "mamba_n_heads": 2,
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


def save_tiny_hybrid(folder: Path, kind: str) -> str:
    """Save a model of that kind, with the tiny tokenizer."""
    torch.manual_seed(0)
    name, options = KINDS[kind]
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**TINY | options))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
