"""Which families run lean: the structure of a tiny model of each is read, as it is when a model is loaded.

What is read so is proved by logits in tests/engine/test_exact.py and tests/engine/model/test_gguf_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers

from engine.core.errors import first_line
from engine.model.loading import unfilled
from engine.model.reader.decoder import describe
from engine.model.structure import OtherStructure

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 32}
_DELTA = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 16}
_GRANITE4 = {"mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
_NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_num_heads": 8}
_BAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "attn_layer_indices": [1]}
_FALCON = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16}
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}

_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
_LATENT |= {"num_key_value_heads": 4}
_MLA = _LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MLA |= {"first_k_dense_replace": 1}


class Family(NamedTuple):
    """config: the name of a class of transformers, with `options` beside the usual sizes. gguf: the architectures that
    files name. note: what holds beside that.
    """

    name: str
    config: str
    options: Mapping[str, Any] = MappingProxyType({})
    gguf: tuple[str, ...] = ()
    note: str = ""


FAMILIES = (
    Family("Llama, Mistral", "LlamaConfig", {}, ("llama",)),
    Family("Ministral 3", "Ministral3Config", {"head_dim": 16}, (), "not lean: queries are scaled by position"),
    Family("Mixtral", "MixtralConfig", {"num_local_experts": 4}, ("llama",), "GGUF: in bfloat16 on a CPU alone"),
    Family("Qwen2", "Qwen2Config", {}, ("qwen2",)),
    Family("Qwen3", "Qwen3Config", {"head_dim": 16}, ("qwen3",)),
    Family("Qwen3 with experts", "Qwen3MoeConfig", {"head_dim": 16} | _EXPERTS, ("qwen3moe",)),
    Family("Qwen3-Next", "Qwen3NextConfig", _DELTA | _SHARED, ("qwen3next",), "own draft head (`mtp`)"),
    Family("Qwen3.5 and later", "Qwen3_5TextConfig", _DELTA, ("qwen35",), "own draft head (`mtp`); no images"),
    Family("Qwen3.5 with experts", "Qwen3_5MoeTextConfig", _DELTA | _SHARED, ("qwen35moe",), "the same"),
    Family("Gemma 2", "Gemma2Config", {"head_dim": 16}, ("gemma2",)),
    Family("Gemma 3", "Gemma3TextConfig", {"head_dim": 16}, ("gemma3",), "no images"),
    Family("Gemma 4", "Gemma4TextConfig", _GEMMA4 | {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4},
           ("gemma4",), "its assistant drafts (`assistant`); no images; on a CPU alone"),
    Family("Gemma 4 12 B", "Gemma4UnifiedTextConfig",
           {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
           ("gemma4",), "the same"),
    Family("Gemma 4 with experts", "Gemma4TextConfig",
           _GEMMA4 | {"layer_types": ["full_attention"] * 4, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
                      "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}, ("gemma4",), "the same"),
    Family("gpt-oss", "GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, ("gpt-oss",),
           "MXFP4 in its own bits, from GGUF and the hub's layout"),
    Family("Phi-3, Phi-4", "Phi3Config", {}, ("phi3",), "GGUF: not with factors for long texts"),
    Family("Phi-1, Phi-2", "PhiConfig"),
    Family("Granite 3", "GraniteConfig", {}, ("granite",), "Granite 4 without Mamba too"),
    Family("Granite 4", "GraniteMoeHybridConfig", _GRANITE4, ("granitehybrid",), "Mamba-2; with experts and without"),
    Family("Bamba", "BambaConfig", _BAMBA, (), "Mamba-2"),
    Family("Nemotron-H", "NemotronHConfig", _NEMOTRON, ("nemotron_h",), "Mamba-2"),
    Family("Nemotron 3 with experts", "NemotronHConfig",
           _NEMOTRON | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
           ("nemotron_h_moe",), "no experts over latents, no own draft head"),
    Family("Falcon-H1", "FalconH1Config", _FALCON, ("falcon-h1",), "Mamba-2 beside attention in every layer"),
    Family("GLM-4 (0414)", "Glm4Config", {"head_dim": 16}, ("glm4",), "no images"),
    Family("GLM-4.5 and later", "Glm4MoeConfig", {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
                                                  "moe_intermediate_size": 64, "first_k_dense_replace": 1}),
    Family("SmolLM3", "SmolLM3Config", {}, ("smollm3",)),
    Family("OLMo 2", "Olmo2Config", {}, ("olmo2",)),
    Family("OLMo 3", "Olmo3Config"),
    Family("OLMoE", "OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    Family("LFM2", "Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, ("lfm2",)),
    Family("LFM2 with experts", "Lfm2MoeConfig", {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}
           | _EXPERTS, ("lfm2moe",)),
    Family("LFM3", "Lfm3Config",
           {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "head_dim": 16}),
    Family("Command R7B, Command A", "Cohere2Config"),
    Family("StarCoder2", "Starcoder2Config"),
    Family("StableLM", "StableLmConfig"),
    Family("Mellum", "MellumConfig", {"head_dim": 16, "layer_types": ["full_attention"] * 4,
                                      "mlp_layer_types": ["sparse"] * 4} | _EXPERTS),
    Family("Arcee", "ArceeConfig", {"head_dim": 16}),
    Family("Hunyuan, dense", "HunYuanDenseV1Config", {"head_dim": 16}),
    Family("EXAONE 4", "Exaone4Config", {"head_dim": 16}),
    Family("ERNIE 4.5", "Ernie4_5Config", {"head_dim": 16}),
    Family("ERNIE 4.5 with experts", "Ernie4_5_MoeConfig",
           {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 64}),
    Family("Trinity (AFMoE)", "AfmoeConfig", {"head_dim": 16, "num_dense_layers": 1} | _EXPERTS),
    Family("Helium", "HeliumConfig", {"head_dim": 16}),
    Family("Seed-OSS", "SeedOssConfig", {"head_dim": 16}),
    Family("GPT-NeoX, Pythia", "GPTNeoXConfig"),
    Family("Apertus", "ApertusConfig"),
    Family("OLMo 1", "OlmoConfig", {}, ("olmo",)),
    Family("BitNet", "BitNetConfig", {}, ("bitnet", "bitnet-25", "bitnet-b1.58"),
           "`I2_S` and the hub's packed layout in two bits"),
    Family("DeepSeek V2", "DeepseekV2Config", _MLA | {"n_group": 1, "topk_group": 1}, ("deepseek2",)),
    Family("DeepSeek V3, Moonlight", "DeepseekV3Config", _MLA | {"n_group": 2, "topk_group": 1}, ("deepseek2",),
           "no own draft head"),
    Family("GLM-4.7-Flash", "Glm4MoeLiteConfig", _MLA, ("deepseek2",), "no own draft head"),
    Family("MiniCPM3", "MiniCPM3Config", _LATENT, ("minicpm3",)),
    Family("Youtu", "YoutuConfig", _LATENT, ("deepseek2",)),
    Family("Kimi Linear", "KimiLinearConfig",
           _LATENT | {"q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 2, "linear_head_dim": 32,
                      "moe_intermediate_size": 64, "linear_num_heads": 4,
                      "layer_types": ["linear_attention", "full_attention"] * 2}, ("kimi-linear",)),
    Family("GPT-2", "GPT2Config", {"hidden_size": 64}),
)  # fmt: skip


def why_not_lean(family: Family) -> str:
    """Return why the lean decoder does not run a family, "" if it does."""
    config = getattr(transformers, family.config)(**_SIZES | dict(family.options))
    try:
        describe(unfilled(config))
    except (OtherStructure, AttributeError) as error:  # a part of the structure is missing
        return first_line(error)
    return ""


def table() -> str:
    """Return the families as a table of Markdown, and a sentence with those of which there is nothing else to say."""
    transformers.logging.set_verbosity_error()  # the sizes are small, and one family names a package that it lacks
    rows, plain = ["| family | GGUF, by its `general.architecture` | beside |", "| --- | --- | --- |"], []
    for family in FAMILIES:
        note = f"not lean: {reason}" if (reason := why_not_lean(family)) else family.note
        if family.gguf or note:
            rows.append(f"| {family.name} | {', '.join(f'`{name}`' for name in family.gguf) or '-'} | {note} |")
        else:
            plain.append(family.name)
    return "\n".join([*rows, "", f"From safetensors alone: {'; '.join(plain)}."])
