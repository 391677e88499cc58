"""The `speculators` format (vllm-project/speculators, `RedHatAI/*-speculator.eagle3`), which vLLM loads.

It holds the tensors of the public layouts under other names, and the layer's configuration in a section of its own.
A head asks for the public names: this module maps them to the file's, and gives the configuration that it expects. An
EAGLE-3 head is written so by `stored_config` and `stored_name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPE = "speculators_model_type"
"""The key that marks a config.json as being of this format; its value is the kind of head."""

PREFIXES = {"eagle": {"fc.": "fusion_fc.", "layers.0.": "transformer."}, "eagle3": {"midlayer.": "layers.0."}}
"""The prefix of a public name and its prefix in the file, by the kind of head."""

_DRAFTED = 5
"""Tokens that an engine drafts a round unless it is told otherwise: as deep as `talon train eagle3` unrolls."""

_LAYER = "transformer_layer_config"
_OF_LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "rope_parameters",
)
_OF_HEAD = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
_SWITCHES = ("norm_before_residual", "norm_before_fc")


def stored_name(name: str, kind: str | None) -> str:
    """Return the file's name for the tensor `name` of the public layout. kind: None for a file in the public layout."""
    for public, stored in PREFIXES.get(kind or "", {}).items():
        if name.startswith(public):
            return stored + name.removeprefix(public)
    return name


def public_config(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as the public layout has it. Raises ValueError that names what cannot be read."""
    kind, layer = config[TYPE], config.get(_LAYER)
    if kind not in PREFIXES:
        raise ValueError(f"{TYPE}={kind!r} is none of {', '.join(PREFIXES)}")
    if not isinstance(layer, dict) or layer.get("model_type", "llama") != "llama":
        raise ValueError(f"{_LAYER} does not describe a Llama layer")
    if config.get("layernorms", False):
        raise ValueError("layernorms=true, norms that EAGLE-1 does not have")
    given = {key: value for key, value in {**layer, **config}.items() if value is not None and key != _LAYER}
    if kind == "eagle":
        given["bias"] = config.get("fusion_bias", False)
        given["target_embeddings"] = "embed_tokens.weight" not in tensors
    return given


def stored_config(config: Mapping[str, Any], name: str, architectures: list[str]) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 head. config: of the public layout, whole. name, architectures: the
    target's.

    What vLLM takes otherwise than the public layout if it is left out is always there: it adds the attention's output
    to the normalised feature, and transformers 4 rotates by a base of 10,000.
    """
    rope = config["rope_parameters"]
    layer = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False}
    layer |= {key: config[key] for key in _OF_LAYER} | {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        layer["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    exact = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        TYPE: "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFTED} | exact],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
        _LAYER: layer,
        **{key: config.get(key) for key in _OF_HEAD},
        **{key: bool(config.get(key, False)) for key in _SWITCHES},
    }
