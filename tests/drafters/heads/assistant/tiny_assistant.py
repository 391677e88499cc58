"""A tiny random Gemma 4 and its assistant, as directories and as the GGUF files that llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from tests.conftest import tiny_tokenizer
from tests.drafters.heads.layouts.head_gguf import write_file
from tests.engine.weights.tiny_gguf import TOKENS

WINDOW = 12
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_assistant(target: Any, ordered: bool = False, **changes: Any) -> Any:
    """An assistant of three layers for a target. ordered: with centroids."""
    of = target.config
    options: dict[str, Any] = {
        "vocab_size": of.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": of.per_layer_config[0].num_key_value_heads,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": of.per_layer_config[1].num_key_value_heads,
        "attention_k_eq_v": of.attention_k_eq_v,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 512,
        "rope_parameters": of.rope_parameters,
        "initializer_range": 0.1,
    }
    backbone = changes.pop("backbone_hidden_size", of.hidden_size)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**options | changes),
        backbone_hidden_size=backbone,
        use_ordered_embeddings=ordered,
        num_centroids=2,
        centroid_intermediate_top_k=1,
    )
    torch.manual_seed(3)
    # transformers 5.23 refuses layers of which none has keys of its own, which are the assistant's
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * config.text_config.num_hidden_layers):
        model = Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.1
            drawn = scale * torch.randn(parameter.shape, generator=generator) + (1.0 if "norm" in name else 0)
            # sharp attention and large states would make a difference of rounding larger with every token
            drawn *= 0.4 if "q_norm" in name or "post_projection" in name else 1
            parameter.copy_(drawn.to(torch.bfloat16))
        for at, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(0.7 + 0.1 * at)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(of.vocab_size, generator=generator))
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_assistant(
    path: Path, model: Any, kind: Kind = Kind.Q8_0, changes: Mapping[str, Any] = MappingProxyType({}), without: str = ""
) -> Path:
    """kind: of the matrices. changes: of the metadata; None leaves out. without: a tensor that is left out."""
    config, text = model.config, model.config.text_config
    kinds = ("sliding_attention", "full_attention")
    sliding, full = (text.per_layer_config[text.layer_types.index(kind)] for kind in kinds)
    metadata: dict[str, Any] = {
        "block_count": text.num_hidden_layers,
        "context_length": text.max_position_embeddings,
        "embedding_length": text.hidden_size,
        "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": sliding.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in text.layer_types],
        "attention.shared_kv_layers": text.num_hidden_layers,
        "rope.freq_base": text.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": text.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "embedding_length_per_layer_input": 0,
        "embedding_length_out": config.backbone_hidden_size,
        "nextn_predict_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
    }
    tokens = TOKENS[: text.vocab_size] + [f"<{i}>" for i in range(text.vocab_size - len(TOKENS))]
    arrays = {name: tensor.float().numpy() for name, tensor in stored(model).items() if name != without}
    return write_file(path, "gemma4-assistant", metadata | {"tokenizer.ggml.tokens": tokens} | changes, arrays, kind)


def stored(model: Any) -> dict[str, Tensor]:
    """The tensors as the converter names them; it leaves centroids out."""
    made = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(("lm_head", "masked_embedding")):
            continue
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            _, _, index, part = module.split(".", 3)
            made[f"blk.{index}.{_NAMES[part]}.weight"] = tensor
        else:
            made[f"{_NAMES[module]}.weight"] = tensor
    made["rope_freqs.weight"] = torch.tensor([1.0] * 4 + [1e30] * 12)  # a quarter of the frequencies are rotated
    return made
