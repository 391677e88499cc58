"""The `speculators` format (vllm-project/speculators, `RedHatAI/*-speculator.eagle3`), which vLLM loads.

It holds the tensors of the public layouts under other names, and the layer's configuration in a section of its own.
A head asks for the public names: this module maps them to the file's, and gives the configuration that it expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPE = "speculators_model_type"
"""The key that marks a config.json as being of this format; its value is the kind of head."""

PREFIXES = {
    "eagle": {"fc.": "fusion_fc.", "layers.0.": "transformer."},
    "eagle3": {"midlayer.": "layers.0."},
}
"""The prefix of a public name and its prefix in the file, by the kind of head."""

_LAYER = "transformer_layer_config"


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
