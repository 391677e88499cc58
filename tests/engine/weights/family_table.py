"""Random models of many families, and what their GGUF files say of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.engine.weights.tiny_gguf import TOKENS

COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 3,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}


class Family(NamedTuple):
    """config: the name of a class of transformers, with `options`. architecture: that GGUF files name. metadata: of the
    family alone, without the architecture before it.
    """

    config: str
    options: dict[str, Any]
    architecture: str
    metadata: Mapping[str, Any] = MappingProxyType({})


_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12}
_SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
}
_HALF = {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": _HALF,
}
_OF_DELTA = {
    "full_attention_interval": 4,
    "rope.dimension_count": 16,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
}
_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
}
_OF_SHARED = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5}
_OF_CONVOLUTIONS = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0]}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
}
_OF_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
    "attention.head_count_kv": [0, 2, 0],
    "attention.scale": 0.2,
    "residual_scale": 0.5,
    "logit_scale": 2.0,
    "embedding_scale": 3.0,
    "rope.scaling.finetuned": False,
}
_BLOCKS = {
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "num_hidden_layers": 5,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
}
_OF_BLOCKS = {name: value for name, value in _OF_MAMBA.items() if name.startswith("ssm.")} | {
    "attention.layer_norm_rms_epsilon": None,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.head_count_kv": [0, 0, 0, 2, 0],
    "feed_forward_length": [0, 96, 0, 0, 96],
    "attention.key_length": 32,
}
_FALCON = {
    "head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
}
_OF_FALCON = {name: value for name, value in _OF_MAMBA.items() if name.startswith("ssm.")}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_OF_LATENT = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 16,
}
_BITNET = {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
_GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
_OF_GROUPED = {
    "expert_count": 8,
    "expert_shared_count": 2,
    "expert_used_count": 3,
    "expert_feed_forward_length": 64,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
}
LONG_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 50_000.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + i / 16 for i in range(8)],
    "long_factor": [2.0 + i / 16 for i in range(8)],
}
_OF_GEMMA = {"attention.sliding_window": 12}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": len(TOKENS),
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50_000.0},
    },
}
_OF_GEMMA4 = _OF_GEMMA | {
    "attention.sliding_window_pattern": [True, False] * 3,
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "rope.freq_base_swa": 10_000.0,
    "final_logit_softcapping": 30.0,
    "embedding_length_per_layer_input": 0,
}
FAMILIES = {
    "llama": Family("LlamaConfig", {}, "llama"),
    "deepseek coder": Family(
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0}},
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama with biases": Family("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, "llama"),
    "mistral": Family("MistralConfig", {"head_dim": 32, "sliding_window": None}, "llama", {"rope.dimension_count": 32}),
    "qwen2": Family("Qwen2Config", {}, "qwen2"),
    "qwen3": Family("Qwen3Config", {"head_dim": 32}, "qwen3"),
    "phi3": Family("Phi3Config", {}, "phi3"),
    "gemma2": Family(
        "Gemma2Config", _GEMMA, "gemma2", _OF_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        _GEMMA | {"num_hidden_layers": 7, "rope_parameters": _SCALED},
        "gemma3",
        _OF_GEMMA | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma2 with other windows and caps": Family(
        "Gemma2Config",
        _GEMMA
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "attn_logit_softcapping": 5.0,
           "final_logit_softcapping": 3.0},
        "gemma2",
        _OF_GEMMA
        | {"attention.sliding_window_pattern": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3 with other windows": Family(
        "Gemma3TextConfig",
        _GEMMA
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "final_logit_softcapping": 3.0,
           "rope_parameters": _SCALED | {"sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0}}},
        "gemma3",
        _OF_GEMMA
        | {"attention.sliding_window_pattern": [False, True, False], "final_logit_softcapping": 3.0,
           "rope.freq_base_swa": 20_000.0, "rope.scaling.factor": 8.0},
    ),
    "gemma3 without windows": Family(
        "Gemma3TextConfig",
        _GEMMA | {"layer_types": ["full_attention"] * 3, "rope_parameters": _SCALED},
        "gemma3",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "olmo": Family(
        "OlmoConfig",
        {"clip_qkv": 0.5},
        "olmo",
        {"attention.clamp_kqv": 0.5, "attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
    ),
    "olmo2": Family("Olmo2Config", {"rms_norm_eps": 1e-5}, "olmo2"),
    "granite": Family(
        "GraniteConfig",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
        "granite",
        {"attention.scale": 0.2, "residual_scale": 0.5, "logit_scale": 2.0, "embedding_scale": 3.0},
    ),
    "granite 4 without mamba": Family(
        "GraniteConfig",
        {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
        "granite",
        {"attention.head_count_kv": [2] * 3, "rope.scaling.finetuned": True, "residual_scale": 0.5,
         "logit_scale": 2.0, "embedding_scale": 3.0},
    ),
    "glm4": Family("Glm4Config", {"head_dim": 32, "rope_parameters": _HALF}, "glm4", {"rope.dimension_count": 16}),
    "smollm3": Family("SmolLM3Config", {"num_hidden_layers": 4}, "smollm3"),
    "qwen3 with experts": Family(
        "Qwen3MoeConfig",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "norm_topk_prob": True},
        "qwen3moe",
        {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
    "mixtral": Family(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "llama",
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen3.5": Family("Qwen3_5TextConfig", _DELTA, "qwen35", _OF_DELTA | _SECTIONS),
    "qwen3.5 with experts": Family(
        "Qwen3_5MoeTextConfig", _DELTA | _SHARED, "qwen35moe", _OF_DELTA | _SECTIONS | _OF_SHARED
    ),
    "qwen3-next": Family("Qwen3NextConfig", _DELTA | _SHARED, "qwen3next", _OF_DELTA | _OF_SHARED),
    "qwen3-next of before 2026": Family(  # whose matrices of delta nets are those of transformers
        "Qwen3NextConfig", _DELTA | _SHARED, "qwen3next", _OF_DELTA | _OF_SHARED | {"full_attention_interval": None}
    ),
    "lfm2": Family("Lfm2Config", _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}, "lfm2", _OF_CONVOLUTIONS),
    "lfm2 with experts": Family(
        "Lfm2MoeConfig",
        _CONVOLUTIONS
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1},
        "lfm2moe",
        _OF_CONVOLUTIONS
        | {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64, "leading_dense_block_count": 1},
    ),
    "granite 4": Family(
        "GraniteMoeHybridConfig",
        _MAMBA
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, "mamba_n_groups": 1},
        "granitehybrid",
        _OF_MAMBA | {"ssm.group_count": 1},
    ),
    "granite 4 with experts": Family(
        "GraniteMoeHybridConfig",
        _MAMBA | {"num_local_experts": 8, "intermediate_size": 64, "shared_intermediate_size": 96},
        "granitehybrid",
        _OF_MAMBA | {"expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 96},
    ),
    "nemotron-h": Family("NemotronHConfig", _BLOCKS, "nemotron_h", _OF_BLOCKS),
    "nemotron 3 with experts": Family(
        "NemotronHConfig",
        _BLOCKS
        | {"layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
           "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96, "routed_scaling_factor": 1.5},
        "nemotron_h_moe",
        _OF_BLOCKS
        | {"feed_forward_length": [0, 64, 0, 0, 64], "expert_count": 8, "expert_used_count": 2,
           "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96, "expert_weights_norm": True,
           "expert_weights_scale": 1.5, "expert_group_count": 1},
    ),
    "falcon-h1": Family("FalconH1Config", _FALCON, "falcon-h1", _OF_FALCON | {"attention.key_length": 32}),
    "gemma4": Family("Gemma4TextConfig", _GEMMA4 | {"hidden_size_per_layer_input": 0}, "gemma4", _OF_GEMMA4),
    "gemma4 with inputs of layers": Family(
        "Gemma4TextConfig",
        _GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        "gemma4",
        _OF_GEMMA4
        | {"attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32,
           "feed_forward_length": [96] * 4 + [192] * 2},
    ),
    "gemma4 whose keys are values": Family(
        "Gemma4TextConfig",
        _GEMMA4 | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "gemma4",
        _OF_GEMMA4 | {"attention.head_count_kv": [2, 1] * 3},
    ),
    "deepseek v2": Family(  # of before llama.cpp split the matrix of keys and values
        "DeepseekV2Config",
        _LATENT | _GROUPED | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
        "deepseek2",
        _OF_LATENT
        | _OF_GROUPED
        | {"attention.q_lora_rank": None, "attention.key_length_mla": None, "attention.value_length_mla": None,
           "attention.head_count_kv": 4, "attention.key_length": 48, "attention.value_length": 16},
    ),
    "deepseek v3": Family(
        "DeepseekV3Config",
        _LATENT
        | _GROUPED
        | {"rope_parameters": _YARN | {"truncate": True, "mscale": 0.707, "mscale_all_dim": 0.707}},
        "deepseek2",
        _OF_LATENT
        | _OF_GROUPED
        | {"expert_gating_func": 2, "expert_weights_norm": True, "rope.scaling.type": "yarn",
           "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 16,
           "rope.scaling.yarn_log_multiplier": 0.0707},
    ),
    "youtu": Family(  # whose layers are all dense
        "YoutuConfig",
        _LATENT,
        "deepseek2",
        _OF_LATENT | {"leading_dense_block_count": 3, "expert_feed_forward_length": 192, "expert_shared_count": 0},
    ),
    "bitnet": Family("BitNetConfig", _BITNET | {"hidden_act": "silu"}, "bitnet",
                     {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}),
    "bitnet 2.5": Family("BitNetConfig", _BITNET, "bitnet-25"),
    "bitnet b1.58": Family("BitNetConfig", _BITNET, "bitnet-b1.58"),
    "kimi linear": Family(
        "KimiLinearConfig",
        {name: value for name, value in (_LATENT | _GROUPED).items() if name not in ("n_routed_experts",
         "first_k_dense_replace")}
        | {"q_lora_rank": None, "num_local_experts": 8, "linear_head_dim": 32, "linear_num_heads": 4,
           "layer_types": ["linear_attention", "full_attention", "linear_attention"], "rope_parameters": None,
           "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "kimi-linear",
        _OF_LATENT
        | _OF_GROUPED
        | {"attention.q_lora_rank": None, "attention.head_count_kv": [0, 1, 0], "kda.head_dim": 32,
           "ssm.conv_kernel": 4, "expert_gating_func": 2},
    ),
    "minicpm3": Family(
        "MiniCPM3Config",
        _LATENT | {"rope_parameters": LONG_FACTORS},
        "minicpm3",
        _OF_LATENT
        | {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.head_count_kv": 4,
           "attention.key_length": 48, "attention.value_length": None},
    ),
    "gemma4 with experts": Family(
        "Gemma4TextConfig",
        _GEMMA4
        | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
           "moe_intermediate_size": 64, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        "gemma4",
        _OF_GEMMA4
        | {"attention.sliding_window_pattern": [True, False], "expert_count": 4, "expert_used_count": 2,
           "expert_feed_forward_length": 64},
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "hidden_size": 64,
         "intermediate_size": 64, "rope_parameters": _YARN},
        "gpt-oss",
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention.sliding_window": 12,
         "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 16},
    ),
}  # fmt: skip
