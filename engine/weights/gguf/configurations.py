"""Configurations that transformers makes of no GGUF file, or not of all that a file says: one function for each family.

A function gets the metadata, short arrays included, and the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata, self.architecture = metadata, architecture

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def common(self, tensors: Sequence[str], model_type: str, architecture: str) -> dict[str, Any]:
        """What most configurations say, with transformers' name of the family and of its model."""
        tokens = {f"{kind}_token_id": self.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
        return tokens | {
            "model_type": model_type,
            "architectures": [architecture],
            "vocab_size": self.metadata["tokenizer.ggml.tokens"],
            "max_position_embeddings": self("context_length"),
            "hidden_size": self("embedding_length"),
            "num_hidden_layers": self("block_count"),
            "num_attention_heads": self("attention.head_count"),
            "rms_norm_eps": self("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "pad_token_id": self.metadata.get("tokenizer.ggml.padding_token_id"),
        }


def _gemma4(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """How much of a head is rotated in layers that see everything stands in a tensor: `families.completed` reads it."""
    value = _Keys(metadata, "gemma4")
    pattern, kv_heads = value("attention.sliding_window_pattern"), value("attention.head_count_kv")
    inner, shared = value("feed_forward_length"), value("attention.shared_kv_layers", 0)
    of_layers = kv_heads if isinstance(kv_heads, list) else [kv_heads] * len(pattern)
    sliding = [heads for heads, one in zip(of_layers, pattern, strict=True) if one]
    full = [heads for heads, one in zip(of_layers, pattern, strict=True) if not one]
    own = [at for at, one in enumerate(pattern[: len(pattern) - shared]) if not one]
    return value.common(tensors, "gemma4_text", "Gemma4ForCausalLM") | {
        "layer_types": [_SLIDING if one else _FULL for one in pattern],
        "num_key_value_heads": max(sliding or full),
        "num_global_key_value_heads": max(full),
        "attention_k_eq_v": not all(f"blk.{at}.attn_v.weight" in tensors for at in own),
        "head_dim": value("attention.key_length_swa"),
        "global_head_dim": value("attention.key_length"),
        "intermediate_size": min(inner) if isinstance(inner, list) else inner,
        "use_double_wide_mlp": isinstance(inner, list) and max(inner) > min(inner),
        "num_kv_shared_layers": shared,
        "sliding_window": value("attention.sliding_window"),
        "hidden_size_per_layer_input": value("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": metadata["tokenizer.ggml.tokens"],
        "final_logit_softcapping": value("final_logit_softcapping"),
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": value("rope.freq_base_swa", 10_000.0)},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": value("rope.freq_base")},
        },
    }


def _gpt_oss(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Every second layer has a window, and positions are scaled by YaRN, but for its truncation."""
    value = _Keys(metadata, "gpt-oss")
    rope = {"rope_type": "default", "rope_theta": value("rope.freq_base")}
    if value("rope.scaling.type") == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": value("rope.scaling.factor"),
            "original_max_position_embeddings": value("rope.scaling.original_context_length"),
            "beta_fast": value("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": value("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
        }
    return value.common(tensors, "gpt_oss", "GptOssForCausalLM") | {
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "intermediate_size": value("expert_feed_forward_length"),
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "sliding_window": value("attention.sliding_window"),
        "rope_parameters": rope,
    }


CONFIGURATIONS = {"gemma4": _gemma4, "gpt-oss": _gpt_oss}
"""By the architecture that files name. transformers' own reader knows less of these families than ours."""
