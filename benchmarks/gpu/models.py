"""Random models and heads: their texts mean nothing, but have to be the same every time."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.core.methods import METHODS

LLAMA_8B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    max_position_embeddings=32768, vocab_size=128256, rms_norm_eps=1e-5,
)  # fmt: skip
TOY = LlamaConfig(
    hidden_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
    max_position_embeddings=512, vocab_size=512,
)  # fmt: skip


def save_small(folder: Path, small: bool) -> str:
    """Save a model and a tokenizer of bytes, as a Hugging Face directory. The logits are far apart, as trained ones
    are.
    """
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408}
    if small:
        size = {"hidden_size": 32, "num_hidden_layers": 6, "intermediate_size": 64}
    config = LlamaConfig(
        **size, vocab_size=264, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048,
        initializer_range=0.1, bos_token_id=None, eos_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_head(method: str, target: LlamaConfig, folder: Path, device: str) -> str:
    """Save a draft head with random weights for a target of that configuration, in the public layout of its method."""
    folder.mkdir(parents=True, exist_ok=True)
    config, shapes, more = layout_of(method, target)
    tensors = {name: random_weight(name, shape, device).cpu() for name, shape in shapes.items()} | more
    (folder / "config.json").write_text(json.dumps(config), encoding="utf8")
    if method in ("medusa", "hydra"):
        torch.save(tensors, folder / f"{method}_lm_head.pt")
    else:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


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
