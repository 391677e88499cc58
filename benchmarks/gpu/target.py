"""Small random models of many families: do they load on the GPU, exact, and captured as graphs?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from engine.model.cuda.graphs import Recorded
from engine.model.target import Target

from .findings import Record, tried

_COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
_HEADS = {"head_dim": 64}
_WINDOW = {"sliding_window": 32}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", _HEADS),
    "gemma3": ("Gemma3TextConfig", _HEADS | _WINDOW),
    "gemma2": ("Gemma2Config", _HEADS | _WINDOW),
    "qwen2": ("Qwen2Config", {}),
    "mistral with a window": ("MistralConfig", _WINDOW),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_oss": ("GptOssConfig", _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "Qwen3MoeConfig", _HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    ),
}  # fmt: skip


def run(device: str) -> Iterator[Record]:
    gpu = device == "cuda"
    for name in _FAMILIES if gpu else ("llama",):  # on a CPU, kernels are compiled for every shape
        for dtype in (torch.bfloat16, torch.float32) if name == "llama" and gpu else (torch.bfloat16,):
            yield tried(f"{name} {dtype}".replace("torch.", ""), _load, name, dtype, device)


def _load(name: str, dtype: torch.dtype, device: str) -> Record:
    family, more = _FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family)(**_COMMON | more)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    Recorded.captures = True
    target = Target.of_model(model, name, kv_memory=64 << 20)
    return {
        "exact": target.exact,
        "inexact": target.inexact,
        "forward": type(target.forward).__name__,
        "captures": Recorded.captures,
    }
