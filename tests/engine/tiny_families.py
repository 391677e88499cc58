"""Random tiny models of the families that run exactly, as safetensors checkpoints and models in memory have them.

tests/engine/weights/family_table.py has those that GGUF files hold.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WIDE, TIMID, WINDOW = {"head_dim": 16}, {"initializer_range": 0.1}, {"sliding_window": 12}
SLIDING = WIDE | WINDOW
ATTENTION, LINEAR = ["full_attention"] * 3, ["linear_attention", "full_attention", "linear_attention"]
CONVOLUTIONS, IN_TURNS = ["conv", "full_attention", "conv"], ["sliding_attention", "full_attention"]
SCALED = {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
SHARED = EIGHT | {"shared_expert_intermediate_size": 32}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32}
MAMBA = MAMBA_HEADS | SCALED | TIMID | {"layer_types": LINEAR, "shared_intermediate_size": 96, "num_local_experts": 0}
BLOCKS = WIDE | TIMID | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32}
FALCON = WIDE | TIMID | MAMBA_HEADS | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "embedding_multiplier": 3.0}
FALCON |= {"lm_head_multiplier": 0.5, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6}
FALCON |= {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.1}
FALCON |= {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_out_multiplier": 0.9}
GEMMA4 = SLIDING | {"num_hidden_layers": 6, "layer_types": IN_TURNS * 3, "global_head_dim": 32}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 30.0}
KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
OF_GEMMA4_12B = {name: value for name, value in GEMMA4.items() if "per_layer" not in name} | KEYS_ARE_VALUES
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48}
OF_LATENT = LATENT | ROUTED | TIMID | {"num_experts_per_tok": 3, "routed_scaling_factor": 1.5}
OF_LATENT |= {"n_group": 4, "topk_group": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", WIDE),
    "mistral with a window": ("MistralConfig", WINDOW),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "gemma2": ("Gemma2Config", SLIDING),
    "gemma3": ("Gemma3TextConfig", SLIDING | {"layer_types": IN_TURNS * 2}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4 with inputs of layers": (
        "Gemma4TextConfig",
        GEMMA4 | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4 whose keys are values": ("Gemma4TextConfig", GEMMA4 | KEYS_ARE_VALUES),
    "gemma4 with experts": (
        "Gemma4TextConfig",
        GEMMA4
        | TIMID
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
        | {"num_hidden_layers": 3, "layer_types": [*IN_TURNS, "sliding_attention"]},
    ),
    "cohere2": ("Cohere2Config", WINDOW | {"logit_scale": 0.5, "layer_types": IN_TURNS * 2}),
    "starcoder2": ("Starcoder2Config", WINDOW),
    "phi": ("PhiConfig", {}),
    "phi with norms of heads": ("PhiConfig", {"qk_layernorm": True}),
    "bitnet": ("BitNetConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "stablelm in parallel": ("StableLmConfig", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "arcee": ("ArceeConfig", WIDE),
    "hunyuan": ("HunYuanDenseV1Config", WIDE),
    "glm4 with experts": ("Glm4MoeConfig", WIDE | ROUTED | TIMID | {"use_qk_norm": True}),
    "mellum": (
        "MellumConfig",
        SLIDING | EIGHT | TIMID | {"mlp_layer_types": ["sparse"] * 3, "layer_types": [*IN_TURNS, "sliding_attention"]},
    ),
    "gpt-oss": (
        "GptOssConfig",
        SLIDING | TIMID | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}),
    "gpt_neox, one after the other": (
        "GPTNeoXConfig",
        {"num_key_value_heads": None, "use_parallel_residual": False, "attention_bias": False},
    ),
    "apertus": ("ApertusConfig", WIDE),
    "olmo": ("OlmoConfig", {"clip_qkv": 1.5}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", SCALED),
    "glm4": ("Glm4Config", WIDE),
    "qwen3 with experts": ("Qwen3MoeConfig", WIDE | EIGHT),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3.5's attention": ("Qwen3_5TextConfig", {"head_dim": 32, "layer_types": ATTENTION}),
    "qwen3.5's shared experts": ("Qwen3_5MoeTextConfig", {"head_dim": 32, "layer_types": ATTENTION} | SHARED),
    "qwen3.5": ("Qwen3_5TextConfig", {"head_dim": 32, "layer_types": LINEAR} | DELTA),
    "qwen3.5 with experts": (
        "Qwen3_5MoeTextConfig",
        {"head_dim": 32, "layer_types": LINEAR} | DELTA | SHARED | {"moe_intermediate_size": 32},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {"head_dim": 32, "layer_types": LINEAR, "decoder_sparse_step": 1} | DELTA | SHARED,
    ),
    "kimi linear": (
        "KimiLinearConfig",
        LATENT
        | TIMID
        | {"q_lora_rank": None, "linear_head_dim": 32, "linear_num_heads": 3}
        | {"layer_types": LINEAR, "mlp_layer_types": ["dense"] * 3},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2 with experts": ("Lfm2MoeConfig", EIGHT | {"layer_types": CONVOLUTIONS, "num_dense_layers": 1}),
    "granite 4": ("GraniteMoeHybridConfig", MAMBA),
    "granite 4 with experts": (
        "GraniteMoeHybridConfig",
        MAMBA | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    ),
    "granite 4 of Mamba-2 alone": (
        "GraniteMoeHybridConfig",
        MAMBA | {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        BLOCKS | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron 3 with experts": (
        "NemotronHConfig",
        BLOCKS
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_intermediate_size": 64}
        | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 96, "routed_scaling_factor": 1.5},
    ),
    "deepseek v2": ("DeepseekV2Config", OF_LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek v3": ("DeepseekV3Config", OF_LATENT),
    "minicpm3": ("MiniCPM3Config", LATENT | TIMID),
    "bamba": ("BambaConfig", MAMBA_HEADS | {"attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1Config", FALCON),
    "falcon-h1 with norms": ("FalconH1Config", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "youtu": ("YoutuConfig", LATENT),
    "gemma4 12b": ("Gemma4UnifiedTextConfig", OF_GEMMA4_12B),
    "lfm3": (
        "Lfm3Config",
        SLIDING | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    ),
    "afmoe": (
        "AfmoeConfig",
        SLIDING
        | EIGHT
        | TIMID
        | {"num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True}
        | {"layer_types": [*IN_TURNS, "sliding_attention"]},
    ),
    "ernie4.5 with experts": (
        "Ernie4_5_MoeConfig",
        TIMID | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64, "moe_layer_start_index": 1},
    ),
    "olmo3": ("Olmo3Config", WINDOW | {"layer_types": [*IN_TURNS, "sliding_attention"]}),
    "olmoe": ("OlmoeConfig", TIMID | {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "exaone4": ("Exaone4Config", WIDE),
    "ernie4.5": ("Ernie4_5Config", WIDE),
    "helium": ("HeliumConfig", WIDE),
    "seed-oss": ("SeedOssConfig", WIDE),
    "glm4 lite with experts": ("Glm4MoeLiteConfig", OF_LATENT),
}
STOCK = {"phi with norms of heads"}
MLA = {"deepseek v2", "deepseek v3", "minicpm3", "youtu"}
SURE = {"gemma4 with experts", "deepseek v2", "deepseek v3", "gpt-oss", "mellum", "glm4 with experts"}
SURE |= {"granite 4 with experts", "nemotron 3 with experts", "afmoe", "ernie4.5 with experts", "olmoe"}
SURE |= {"glm4 lite with experts"}
ROUTERS = ("mlp.gate.weight", "router.weight", "router.proj.weight", "router.scale", "mixer.gate.weight")
ROUTERS += ("router.gate.weight",)
CORRECTIONS = ("expert_bias", "e_score_correction_bias")
SIGMOIDS = {"deepseek v3", "glm4 lite with experts", "afmoe"}
EXPERTS = {"gpt-oss", "mellum", "glm4 with experts", "qwen3 with experts", "mixtral", "qwen3.5's shared experts"}
EXPERTS |= {"deepseek v2", "deepseek v3", "gemma4 with experts", "afmoe", "ernie4.5 with experts", "olmoe"}
EXPERTS |= {"glm4 lite with experts"}
STATES = {"qwen3.5", "qwen3.5 with experts", "qwen3-next", "lfm2", "lfm2 with experts", "granite 4", "bamba"}
STATES |= {"kimi linear", "granite 4 of Mamba-2 alone", "granite 4 with experts", "nemotron-h"}
STATES |= {"nemotron 3 with experts", "falcon-h1", "falcon-h1 with norms", "lfm3"}
IN_BOTH = {"llama", "gemma2", "gemma4 with inputs of layers", "gpt-oss", "qwen3.5", "lfm2", "granite 4 with experts"}
IN_BOTH |= {"deepseek v3", "phi with norms of heads"}
"""Families that run in both types in any case: each kind of layer, and the stock forward."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(family: str, dtype: str, **changes: Any) -> Any:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    if family in ("gemma3", "smollm3", "cohere2"):  # whose layers are of two kinds, every fourth of another
        changes = {"num_hidden_layers": 4} | changes
    config = getattr(transformers, name)(**COMMON | options | changes)
    model = AutoModelForCausalLM.from_config(config)
    if family in SURE:  # near ties, which rounding turns, are as rare as with trained routers
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if key.endswith(ROUTERS):
                    parameter *= 3 if family in SIGMOIDS else 8  # sigmoids would be equal if they were near 1
                if key.endswith(CORRECTIONS):
                    parameter += 0.2 * torch.randn(parameter.shape)
    return model.to(TYPES[dtype]).eval()
