"""Configurations that transformers makes of no GGUF file, or not of all that a file says: one function for each family.

A function gets the metadata, short arrays included, and the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from engine.core.errors import ModelError
from engine.weights.gguf.mamba import mamba_config

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_SOFTMAX, _SIGMOID = 1, 2  # kinds of routers, as llama.cpp numbers them
_SCALED_BY_HIDDEN = (("gemma2", 46), ("gemma3", 62))
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Factors in the metadata, and the configuration's names for them."""


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata, self.architecture = metadata, architecture

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def common(self, tensors: Sequence[str], model_type: str, architecture: str) -> dict[str, Any]:
        """Return the fields that most configurations share, with transformers' names of the family and of its model."""
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


def _gemma2(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Gemma 2. Windows, their pattern and the caps have the values of llama.cpp's code
    where the file has none.
    """
    value = _Keys(metadata, "gemma2")
    theta = value("rope.freq_base", 10_000.0)
    if value("rope.freq_base_swa", theta) != theta:
        raise ModelError("gemma2.rope.freq_base_swa: two bases of positions are not read in this family")
    return _gemma_sizes(value, tensors, "gemma2", "Gemma2ForCausalLM") | {
        "layer_types": _window_layers(value, 2),
        "sliding_window": value("attention.sliding_window", 4096),
        "attn_logit_softcapping": value("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": value("final_logit_softcapping", 30.0) or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _gemma3(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Gemma 3. A file that names no window has none, in any layer."""
    value = _Keys(metadata, "gemma3")
    window = value("attention.sliding_window")
    bases = {_SLIDING: value("rope.freq_base_swa", 10_000.0), _FULL: value("rope.freq_base", 10_000.0)}
    return _gemma_sizes(value, tensors, "gemma3_text", "Gemma3ForCausalLM") | {
        "layer_types": _window_layers(value, 6) if window else [_FULL] * value("block_count"),
        "sliding_window": window or value("context_length"),
        "final_logit_softcapping": value("final_logit_softcapping") or None,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    }


def _gemma_sizes(value: _Keys, tensors: tuple[str, ...], model_type: str, architecture: str) -> dict[str, Any]:
    """Return what Gemma 2 and 3 share. Models of 27 B are known by their layers, as llama.cpp knows them: their queries
    are scaled by hidden size over heads.
    """
    head_dim, heads = value("attention.key_length"), value("attention.head_count")
    by_hidden = (value.architecture, value("block_count")) in _SCALED_BY_HIDDEN
    return value.common(tensors, model_type, architecture) | {
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": value("feed_forward_length"),
        "query_pre_attn_scalar": value("embedding_length") // heads if by_hidden else head_dim,
    }


def _window_layers(value: _Keys, usual: int) -> list[str]:
    """Return the kinds of layers from a list of those with a window, or from how many layers there are to one without
    a window. usual: that number where the file names none.
    """
    layers, named = value("block_count"), value("attention.sliding_window_pattern", usual)
    if not isinstance(named, list):
        named = [(at + 1) % named != 0 if named else True for at in range(layers)]
    if len(named) != layers:
        key = f"{value.architecture}.attention.sliding_window_pattern"
        raise ModelError(f"{key} is of {len(named)} layers, and block_count is {layers}")
    return [_SLIDING if one else _FULL for one in named]


def _gemma4(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Gemma 4. The share of a head that is rotated in layers without a window is stored in
    a tensor, which `families.completed` reads.
    """
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
        "enable_moe_block": bool(value("expert_count", 0)),
        "num_experts": value("expert_count"),
        "top_k_experts": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": value("rope.freq_base_swa", 10_000.0)},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": value("rope.freq_base")},
        },
    }


def _deepseek2(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """DeepSeek V2 where shares are a softmax, V3 and what is built like it otherwise. Files say little of a router: one
    without a kind is a softmax, unless it corrects what experts are chosen by. A draft head's block comes last.
    """
    value = _Keys(metadata, "deepseek2")
    corrected = any(name.endswith("exp_probs_b.bias") for name in tensors)
    experts, kind = value("expert_count", 0), value("expert_gating_func", _SIGMOID if corrected else _SOFTMAX)
    layers = value("block_count") - value("nextn_predict_layers", 0)
    groups, normalised = value("expert_group_count", 1), value("expert_weights_norm", False)
    softmax = bool(experts) and kind == _SOFTMAX
    if kind not in (_SIGMOID, _SOFTMAX) or (softmax and (normalised or corrected)):
        raise ModelError("deepseek2.expert_gating_func: a router of this kind is not read")
    name = ("deepseek_v2", "DeepseekV2ForCausalLM") if softmax else ("deepseek_v3", "DeepseekV3ForCausalLM")
    rope, scale = _yarn(value), 10 * value("rope.scaling.yarn_log_multiplier", 0.0)
    return (
        value.common(tensors, *name)
        | _latent_sizes(value)
        | {
            "num_hidden_layers": layers,
            "first_k_dense_replace": value("leading_dense_block_count", 0) if experts else layers,
            "n_routed_experts": experts,
            "n_shared_experts": value("expert_shared_count", 0),
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "norm_topk_prob": normalised,
            "routed_scaling_factor": value("expert_weights_scale", 1.0),
            "n_group": groups,
            "topk_group": value("expert_group_used_count", 1),
            "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
            "rope_parameters": rope | ({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
        }
    )


def _kimi_linear(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """A layer without heads of keys has a state. Shares are normalised sigmoids, as in llama.cpp's code."""
    value = _Keys(metadata, "kimi-linear")
    kv_heads, layers = value("attention.head_count_kv"), value("block_count")
    if not isinstance(kv_heads, list) or len(kv_heads) != layers:
        raise ModelError(f"kimi-linear.attention.head_count_kv is not of {layers} layers; get the file again")
    dense = value("leading_dense_block_count", 0)
    return (
        value.common(tensors, "kimi_linear", "KimiLinearForCausalLM")
        | _latent_sizes(value)
        | {
            "layer_types": [_FULL if heads else _LINEAR for heads in kv_heads],
            "linear_head_dim": value("kda.head_dim"),
            "linear_num_heads": value("attention.head_count"),
            "linear_conv_kernel_dim": value("ssm.conv_kernel"),
            "mlp_layer_types": ["dense" if at < dense else "sparse" for at in range(layers)],
            "num_local_experts": value("expert_count"),
            "n_shared_experts": value("expert_shared_count"),
            "num_experts_per_tok": value("expert_used_count"),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "routed_scaling_factor": value("expert_weights_scale", 1.0),
            "n_group": value("expert_group_count", 1),
            "topk_group": value("expert_group_used_count", 1),
            "norm_topk_prob": True,
        }
    )


def _latent_sizes(value: _Keys) -> dict[str, Any]:
    """Return the sizes of latent attention and of MLPs. Older files say those of a head where newer ones say the
    vector's.
    """
    rotated, heads = value("rope.dimension_count"), value("attention.head_count")
    sizes = {
        "num_key_value_heads": heads,
        "q_lora_rank": value("attention.q_lora_rank"),
        "kv_lora_rank": value("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": value("attention.key_length_mla", value("attention.key_length")) - rotated,
        "intermediate_size": value("feed_forward_length"),
    }
    of_values = value("attention.value_length_mla", value("attention.value_length"))
    return sizes | ({} if of_values is None else {"v_head_dim": of_values})


def _minicpm3(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Factors of embeddings, layers and logits are those of the one model of this kind, as in llama.cpp's code."""
    value = _Keys(metadata, "minicpm3")
    rope = {"rope_type": "default", "rope_theta": value("rope.freq_base", 10_000.0)}
    return value.common(tensors, "minicpm3", "MiniCPM3ForCausalLM") | _latent_sizes(value) | {"rope_parameters": rope}


def _yarn(value: _Keys) -> dict[str, Any]:
    """Return how positions are scaled."""
    rope = {"rope_type": "default", "rope_theta": value("rope.freq_base", 10_000.0)}
    if value("rope.scaling.type") != "yarn":
        return rope
    return rope | {
        "rope_type": "yarn",
        "factor": value("rope.scaling.factor"),
        "original_max_position_embeddings": value("rope.scaling.original_context_length"),
        "beta_fast": value("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": value("rope.scaling.yarn_beta_slow", 1.0),
    }


def _gpt_oss(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of gpt-oss. Every second layer has a window, and positions are scaled by YaRN, but for
    its truncation.
    """
    value = _Keys(metadata, "gpt-oss")
    rope = _yarn(value)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return value.common(tensors, "gpt_oss", "GptOssForCausalLM") | {
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "intermediate_size": value("expert_feed_forward_length"),
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "sliding_window": value("attention.sliding_window"),
        "rope_parameters": rope,
    }


def _granite(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Granite 3, and of Granite 4 without Mamba, whose KV heads are listed by layer."""
    value = _Keys(metadata, "granite")
    kv_heads = value("attention.head_count_kv")
    kinds = set(kv_heads) if isinstance(kv_heads, list) else {kv_heads}
    if len(kinds) != 1:
        raise ModelError("granite.attention.head_count_kv is not the same in all layers; such a model is not read")
    if not value("rope.scaling.finetuned", True):
        raise ModelError("granite.rope.scaling.finetuned is false: a Granite without positions is not read")
    _check_rotated(value)
    return (
        value.common(tensors, "granite", "GraniteForCausalLM")
        | _granite_factors(value)
        | {
            "num_key_value_heads": kinds.pop(),
            "intermediate_size": value("feed_forward_length"),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 10_000.0)},
        }
    )


def _check_rotated(value: _Keys) -> None:
    """Raise ModelError for heads of which only a part is rotated, as Bamba's."""
    head = value("embedding_length") // value("attention.head_count")
    if (rotated := value("rope.dimension_count", head)) != head:
        raise ModelError(f"{value.architecture}.rope.dimension_count is {rotated}, and a head has {head}; not read")


def _granite_factors(value: _Keys) -> dict[str, float]:
    """Return Granite's factors by the configuration's names. Scores have the usual one where the file names none."""
    usual = (value("embedding_length") // value("attention.head_count")) ** -0.5
    named = {name: value(key) for key, name in _GRANITE.items() if value(key)}
    return {"attention_multiplier": usual} | named


def _granitehybrid(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Granite 4. A layer without KV heads is Mamba-2. The MLP of a dense model is the
    shared one of a model with experts.
    """
    value = _Keys(metadata, "granitehybrid")
    sizes, hidden, inner = mamba_config(metadata, "granitehybrid"), value("embedding_length"), value("ssm.inner_size")
    kv_heads, experts = value("attention.head_count_kv"), value("expert_count", 0)
    if not isinstance(kv_heads, list) or len(kv_heads) != value("block_count") or not max(kv_heads):
        raise ModelError("granitehybrid.attention.head_count_kv does not say which layers attend; get the file again")
    if inner % hidden:
        raise ModelError(f"granitehybrid.ssm.inner_size is {inner}, no multiple of embedding_length ({hidden})")
    has_positions, theta = value("rope.scaling.finetuned", True), value("rope.freq_base", 10_000.0)
    if has_positions:
        _check_rotated(value)
    return (
        value.common(tensors, "granitemoehybrid", "GraniteMoeHybridForCausalLM")
        | sizes
        | _granite_factors(value)
        | {
            "layer_types": [_FULL if heads else _LINEAR for heads in kv_heads],
            "num_key_value_heads": max(kv_heads),
            "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
            "mamba_expand": inner // hidden,
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "intermediate_size": value("feed_forward_length"),
            "shared_intermediate_size": value(
                "expert_shared_feed_forward_length" if experts else "feed_forward_length"
            ),
            "num_local_experts": experts,
            "num_experts_per_tok": value("expert_used_count", 0),
            "position_embedding_type": "rope" if has_positions else None,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    )


def _nemotron_h(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Nemotron-H. A layer is attention, an MLP, or Mamba-2 where it has neither KV heads
    nor an inner size.
    """
    return _of_blocks(_Keys(metadata, "nemotron_h"), tensors, "mlp")


def _nemotron_h_moe(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Nemotron-H with experts in the place of MLPs."""
    value = _Keys(metadata, "nemotron_h_moe")
    if value("nextn_predict_layers"):
        raise ModelError("nemotron_h_moe.nextn_predict_layers: a draft head of this family is not read")
    return _of_blocks(value, tensors, "moe") | {
        "n_routed_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": value("expert_shared_feed_forward_length"),
        "moe_latent_size": value("moe_latent_size"),
        "norm_topk_prob": value("expert_weights_norm", True),
        "routed_scaling_factor": value("expert_weights_scale", 1.0),
        "n_group": value("expert_group_count", 1),
    }


def _of_blocks(value: _Keys, tensors: tuple[str, ...], with_inner: str) -> dict[str, Any]:
    """with_inner: what a layer with an inner size is."""
    sizes = mamba_config(value.metadata, value.architecture)
    kv_heads, inner = value("attention.head_count_kv"), value("feed_forward_length")
    for key, each in (("attention.head_count_kv", kv_heads), ("feed_forward_length", inner)):
        if not isinstance(each, list) or len(each) != value("block_count") or not max(each):
            raise ModelError(f"{value.architecture}.{key} is not of {value('block_count')} layers; get the file again")
    kinds = {(True, False): _FULL, (False, True): with_inner, (False, False): _LINEAR}
    names = {"ssm_state_size": "d_state", "mamba_num_heads": "n_heads", "mamba_head_dim": "d_head"}
    names |= {"n_groups": "n_groups", "conv_kernel": "d_conv"}
    return value.common(tensors, "nemotron_h", "NemotronHForCausalLM") | {
        **{name: sizes[f"mamba_{size}"] for name, size in names.items()},
        "layers_block_type": [kinds[heads > 0, size > 0] for heads, size in zip(kv_heads, inner, strict=True)],
        "num_key_value_heads": max(kv_heads),
        "head_dim": value("attention.key_length"),
        "intermediate_size": max(inner),
        "layer_norm_epsilon": value("attention.layer_norm_rms_epsilon") or value("attention.layer_norm_epsilon"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
    }


def _falcon_h1(metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of Falcon-H1. Its scaling factors are already multiplied into the file's matrices."""
    value = _Keys(metadata, "falcon-h1")
    return (
        value.common(tensors, "falcon_h1", "FalconH1ForCausalLM")
        | mamba_config(metadata, "falcon-h1")
        | {
            "num_key_value_heads": value("attention.head_count_kv"),
            "head_dim": value("attention.key_length"),
            "intermediate_size": value("feed_forward_length"),
            "mamba_d_ssm": value("ssm.inner_size"),
            "mamba_rms_norm": any(name.endswith("ssm_norm.weight") for name in tensors),
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
            "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
        }
    )


def _bitnet(architecture: str, activation: str, metadata: dict[str, Any], tensors: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of BitNet. Which activation it has is in the graphs of llama.cpp and bitnet.cpp alone,
    and both multiply by the embedding.
    """
    value = _Keys(metadata, architecture)
    return value.common(tensors, "bitnet", "BitNetForCausalLM") | {
        "num_key_value_heads": value("attention.head_count_kv"),
        "intermediate_size": value("feed_forward_length"),
        "hidden_act": activation,
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 10_000.0)},
        "tie_word_embeddings": True,
    }


CONFIGURATIONS: dict[str, Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]] = {
    "bitnet": partial(_bitnet, "bitnet", "silu"),
    "bitnet-25": partial(_bitnet, "bitnet-25", "relu2"),
    "bitnet-b1.58": partial(_bitnet, "bitnet-b1.58", "relu2"),
    "deepseek2": _deepseek2,
    "falcon-h1": _falcon_h1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitehybrid": _granitehybrid,
    "kimi-linear": _kimi_linear,
    "minicpm3": _minicpm3,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
}
"""By the architecture that files name. transformers' own reader knows less of these families than ours."""
