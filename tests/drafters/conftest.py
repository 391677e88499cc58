"""Tiny real targets and heads in the public layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.heads.checkpoint import TargetWeights
from tests.conftest import tiny_tokenizer

HIDDEN, VOCAB, LAYERS, FFN, HEADS, KV_HEADS = 32, 64, 6, 48, 4, 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(autouse=True)
def _float32_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float32(monkeypatch)


def compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heads compute in float32, in which references are compared, whatever this processor multiplies fastest."""
    for module in ("drafters.training.target", "drafters.training.trainer"):
        monkeypatch.setattr(f"{module}.has_native_bfloat16", lambda: False)
    monkeypatch.setattr("drafters.heads.layers.multiplies", lambda dtype: False)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Llama whose logits are peaked enough for drafting to be worth it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("target")
    config = LlamaConfig(**LLAMA, num_hidden_layers=LAYERS, tie_word_embeddings=True, bos_token_id=0, eos_token_id=3)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() == 2 else 1
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target(target_dir: Path) -> TargetWeights:
    return TargetWeights.read(str(target_dir))


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def write_checkpoint(path: Path, file: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, str(path / file))
    else:
        torch.save(tensors, path / file)
    return str(path)


def layer_shapes(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    return {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
    }
