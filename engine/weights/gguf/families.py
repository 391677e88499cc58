"""How GGUF files hold a model, by transformers' tables and what they leave out: keys of the metadata, whole families.

`teach_transformers` extends transformers' own tables; `completed` does the rest to a configuration made by them.

llama.cpp renames tensors, permutes the rows of some and offsets the values of others. The names of the package `gguf`
and transformers' own processors undo that. They are given the numbers of the rows instead of a matrix, so the order of
the rows is known without moving any. Experts are three tensors a layer, two of which transformers holds as one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, dequantize, get_tensor_name_map
from torch import Tensor
from transformers import MixtralConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    LlamaTensorProcessor,
    TensorProcessor,
)

from engine.core.errors import ModelError, shown
from engine.weights.gguf.configurations import CONFIGURATIONS
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.header import GgufTensor
from engine.weights.gguf.hybrids import HYBRIDS, check_hybrid, draft_block, layer_readers, teach_hybrids
from engine.weights.stored_weights import Place, Unreadable, held, is_vector, named, stored_buffers

_COMMON = GGUF_CONFIG_MAPPING["qwen2"]
_KEYS: dict[str, dict[str, str | None]] = {
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3_moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "olmo": _COMMON | {"attention.clamp_kqv": "clip_qkv"},
    "olmo2": _COMMON,
    "glm4": _COMMON | {"attention.key_length": "head_dim"},
    "smollm3": _COMMON,
}
"""Names in the configuration, by transformers' name of the family and the key of the metadata."""
_OWN = ("olmo", "olmo2", "glm4", "smollm3")
"""Families that transformers reads from no GGUF file. Their names are those of the architectures too."""
_NEIGHBOURS = ("granite", "olmo", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Families whose heads llama.cpp stores with neighbouring dimensions rotated, as Llama's are."""
_LONG_FACTORS = ("minicpm3",)
"""Architectures whose files hold factors for long texts, which begin where the context ends."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Parameters that hold the matrices of all experts of a layer, and the tensors that hold their outputs in turn."""
_NAMED_AS = {"bitnet-25": "bitnet", "bitnet-b1.58": "bitnet"}
"""Architectures that the package `gguf` does not know, and one with the same names of tensors."""
_IN_TURN = ("gpt-oss",)
"""Architectures whose experts transformers holds with inputs before outputs, and the outputs of gate and up in turn."""
_CALLED = {
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.experts": "mlp.experts",
    "mixer.experts": "mlp.experts",
    "mixer.gate": "mlp.gate",
    "e_score_correction_bias": "e_score_correction.bias",
    "router.per_expert_scale": "experts.down_proj.scale",
    "router.scale": "router.proj.scale",
    "forget_gate.f_": "f_",
    "attn_sub_norm": "inner_attn_ln",
    "ffn_sub_norm": "ffn_layernorm",
}
"""Parts of transformers' names, and what the package `gguf` has for them."""
_WIDE = (".expert_bias", ".e_score_correction_bias")
"""How the names of vectors end that stay float32."""
_ALONE = {"expert_bias": "bias", "layer_scalar": "weight", "sinks": "weight"}
"""Names of parameters that are not parts of a linear layer, and how the names of their tensors end."""


@cache
def teach_transformers() -> None:
    """Add to transformers' tables the families that it reads from no GGUF file, and what it leaves out of others."""
    for family, names in _KEYS.items():
        GGUF_CONFIG_MAPPING.setdefault(family, {}).update(names)
    GGUF_SUPPORTED_ARCHITECTURES.extend(_OWN)
    TENSOR_PROCESSORS.update(dict.fromkeys(_NEIGHBOURS, LlamaTensorProcessor))
    teach_hybrids()
    GGUF_CONFIG_ARCHS.update(CONFIGURATIONS)


def is_filled(file: GgufFile) -> bool:
    """Return whether a stock model gets the file's weights from `located`, and not from transformers' own reader."""
    return file.architecture in (*HYBRIDS, *CONFIGURATIONS)


def located(file: GgufFile, model: Any) -> tuple[dict[str, Place], dict[str, Tensor]]:
    """Return, by parameter name, where the file stores each matrix and the values of all other parameters. `model` is
    on the meta device.

    Raises Unreadable if the file holds them in a way that is not read, and ModelError for values that are not numbers.
    """
    config = model.config.get_text_config()
    teach_transformers()
    processor: TensorProcessor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
    known = _NAMED_AS.get(file.architecture, file.architecture)
    architecture = next((key for key, name in MODEL_ARCH_NAMES.items() if name == known), None)
    if architecture is None:
        raise Unreadable(f"gguf knows no {file.architecture}")
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    read: set[str] = set()
    places: dict[str, Place] = {}
    vectors: dict[str, Tensor] = {}
    for layer in layer_readers(file, model):
        places |= layer.places
        vectors |= layer.vectors
        read |= layer.read
    for name, same in _rest(model, {*places, *vectors}).items():
        found = next((there for one in reversed(same) if (there := _find(one, names, tensors))), None)
        if found is None:
            raise Unreadable(f"{name} is not in the file")
        read |= {tensor.name for tensor in found}
        parameter = held(model, name)
        in_turn = file.architecture in _IN_TURN and ".experts." in name
        if name.endswith("_bias") and in_turn:
            of_parts = [_values(file, one, processor, torch.Size(one.shape[::-1])) for one in found]
            vectors |= dict.fromkeys(same, torch.stack(of_parts, dim=-1).flatten(1).to(model.dtype))
        elif is_vector(parameter):
            values = _values(file, found[0], processor, parameter.shape)
            vectors |= dict.fromkeys(same, values if name.endswith(_WIDE) else values.to(model.dtype))
        else:
            places |= dict.fromkeys(same, _place(found, processor, tuple(parameter.shape), in_turn))
    ignored = ("rope_", *filter(None, [draft_block(file)]), *_unused(model, names))
    if left := [name for name in tensors if name not in read and not name.startswith(ignored)]:
        raise Unreadable(f"{left[0]} is not of this model")
    return places, vectors


def _rest(model: Any, known: set[str]) -> dict[str, list[str]]:
    """Return all names of each parameter, and of each buffer that a checkpoint holds, by the first, without the known
    ones.
    """
    return {name: same for name, same in (named(model) | stored_buffers(model)).items() if name not in known}


def _unused(model: Any, names: TensorNameMap) -> list[str]:
    """Return how the names of tensors begin that transformers leaves out too: layers that read others' keys have some
    of their own.
    """
    left_out = getattr(model.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found = [names.get_name(f"model.{module}") for module in left_out]
    return [f"{name}." for name in found if name is not None]


def _find(name: str, names: TensorNameMap, tensors: Mapping[str, GgufTensor]) -> list[GgufTensor]:
    """Return the tensors that hold a parameter, in their order; none if one of them is not there."""
    for usual, called in _CALLED.items():
        name = name.replace(usual, called)
    name = re.sub(r"(layers\.\d+)\.experts", r"\1.mlp.experts", name)
    module, _, suffix = name.rpartition(".")
    known = names.get_name(module) or names.get_name(module.replace("model.", "backbone.", 1))
    sought = [f"{known}.{suffix}" if known else f"{names.get_name(name)}"]
    if suffix in _ALONE:
        sought = [f"{names.get_name(name)}.{_ALONE[suffix]}"]
    if module.endswith(".experts"):
        parts, ending = _EXPERTS.get(suffix.removesuffix("_bias"), ()), "bias" if suffix.endswith("_bias") else "weight"
        sought = [f"{names.get_name(f'{module}.{part}')}.{ending}" for part in parts]
        if not all(stored in tensors for stored in sought):  # gate and up may be one tensor too
            sought = [f"{names.get_name(name)}.{ending}"]
    return [tensors[stored] for stored in sought] if sought and all(stored in tensors for stored in sought) else []


def _place(tensors: list[GgufTensor], processor: TensorProcessor, shape: tuple[int, ...], in_turn: bool) -> Place:
    named = tuple(tensor.name for tensor in tensors)
    *count, outputs, inputs = (shape[0], shape[2], shape[1]) if in_turn else shape
    each = outputs // len(tensors)
    row = (inputs,) if outputs == 1 else None  # one output has no dimension of its own
    if any(tensor.shape not in ((inputs, each, *count), row) for tensor in tensors) or each * len(tensors) != outputs:
        raise Unreadable(f"{named[0]} is stored in another shape")
    if count:
        return Place(named, shape, in_turn=in_turn)
    rows = np.arange(outputs)
    made = processor.process(rows[:, None], name=named[0])
    if made.name is None or made.weights.shape != (outputs, 1):
        raise Unreadable(f"{named[0]} is stored in another shape")
    order = np.ascontiguousarray(made.weights[:, 0])
    if not np.array_equal(np.sort(order), rows):
        raise Unreadable(f"{named[0]} is stored with other values")
    return Place(named, shape, b"" if np.array_equal(order, rows) else order.astype(np.int64).tobytes())


def _values(file: GgufFile, tensor: GgufTensor, processor: TensorProcessor, shape: torch.Size) -> Tensor:
    raw = dequantize(file.read(tensor), tensor.kind).reshape(tensor.shape[::-1])
    made = processor.process(raw, name=tensor.name)
    if made.name is None or made.weights.shape != shape:
        raise Unreadable(f"{tensor.name} is stored in another shape")
    values = torch.from_numpy(np.ascontiguousarray(made.weights))
    if not values.to(torch.bfloat16).isfinite().all():
        raise ModelError(f"{file.field}: tensor {tensor.name} holds NaN or infinity; get the file again")
    return values


def completed(file: GgufFile, config: Any) -> Any:
    """Complete the configuration that transformers has read with what it has left out. Raises ModelError if the file's
    scaling of positions cannot be followed.
    """
    value, architecture = _Values(file), file.architecture
    if architecture == "olmo2" and value("attention.sliding_window"):
        raise ModelError("OLMo 3, whose windows are not read from GGUF")
    config.vocab_size = value("vocab_size", file.metadata["tokenizer.ggml.tokens"])
    if architecture in HYBRIDS:
        check_hybrid(file)
        _refuse_factors(file)
        _refuse_scaling(value)
        return config
    if (config.pad_token_id or 0) >= config.vocab_size:  # transformers' default is that of the family's largest model
        config.pad_token_id = None
    if architecture == "llama" and hasattr(config, "sliding_window"):  # transformers' default for Mistral is a window
        config.sliding_window = None
    if architecture == "llama" and value("expert_count", 0):
        config = _with_experts(config, value)
    if architecture == "phi3":
        config.sliding_window = config.sliding_window or None
    if architecture == "llama" and hasattr(config, "mlp_bias"):
        config.attention_bias = file.tensor("blk.0.attn_output.bias") is not None
        config.mlp_bias = file.tensor("blk.0.ffn_up.bias") is not None
    if architecture in _OWN and hasattr(config, "attention_bias"):
        config.attention_bias = file.tensor("blk.0.attn_q.bias") is not None
    _scale_positions(file, config, value)
    return config


class _Values:
    """The metadata of the file's architecture."""

    def __init__(self, file: GgufFile):
        self.file = file

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{key}", default)


def _with_experts(config: Any, value: _Values) -> MixtralConfig:
    """Return the configuration as Mixtral's, which llama.cpp takes for a Llama."""
    known = {key: what for key, what in config.to_dict().items() if key not in ("model_type", "architectures")}
    counts = {"num_local_experts": value("expert_count"), "num_experts_per_tok": value("expert_used_count")}
    return MixtralConfig(**(known | counts | {"sliding_window": None}))


def _scale_positions(file: GgufFile, config: Any, value: _Values) -> None:
    """Set the part of a head that is rotated and the scaling of positions; ModelError if its kind is unknown.

    Llama 3's scaling is stored as one factor per frequency, from which its parameters follow.
    """
    rope = dict(config.get_text_config().rope_parameters or {})
    if "partial_rotary_factor" in rope:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = value("rope.dimension_count", head_dim) / head_dim
    if value("rope.dimension_sections") is not None:
        raise ModelError("its positions of images (rope.dimension_sections) are not read from GGUF")
    factors, long, short = (file.values(f"rope_{name}.weight") for name in ("freqs", "factors_long", "factors_short"))
    if file.architecture in _LONG_FACTORS and long is not None and short is not None:
        rope |= {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        rope["original_max_position_embeddings"] = config.max_position_embeddings
    elif factors is not None and "full_attention" in rope:  # Gemma 4: what is not rotated is divided by 1e30
        _refuse_scaling(value)
        rope["full_attention"] |= {"partial_rotary_factor": float((factors == 1).mean())}
    elif factors is not None:
        _refuse_scaling(value)
        factor = float(factors.max())
        if not np.allclose(factors, llama3_factors(rope["rope_theta"], len(factors), factor), rtol=1e-3):
            raise ModelError("its rope_freqs are not those of Llama 3")
        rope |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    else:
        _refuse_factors(file)
        scaled = rope.get("full_attention", rope)  # Gemma 3 scales the positions of layers without a window
        if _scaling(value) == "linear" and scaled.get("rope_type") == "default":
            scaled.update(rope_type="linear", factor=_factor(value))
        elif scaled.get("rope_type", "default") == "default":
            _refuse_scaling(value)
    if rope:
        config.rope_parameters = rope


def _scaling(value: _Values) -> str:
    """Return how positions are scaled: linearly where the file names no kind, and "none" for a factor of 1."""
    kind = str(value("rope.scaling.type", "linear"))
    return "none" if kind == "linear" and _factor(value) == 1 else kind


def _factor(value: _Values) -> float:
    """Return what positions are divided by. Files of 2023 have the second key; llama.cpp takes 0 for 1."""
    return float(value("rope.scaling.factor", value("rope.scale_linear", 1.0))) or 1.0


def _refuse_scaling(value: _Values) -> None:
    if (kind := _scaling(value)) != "none":
        raise ModelError(f"its scaling of positions ({shown(kind)}) is not read from GGUF")


def _refuse_factors(file: GgufFile) -> None:
    if any(tensor.name.startswith("rope_") for tensor in file.tensors):
        raise ModelError("its position factors (rope_*) are not read from GGUF")


def llama3_factors(theta: float, frequencies: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return what Llama 3.1 divides each frequency by: 1 for high ones, `factor` for low ones,
    interpolated in between.
    """
    low, high, length = _LLAMA3.values()
    wavelengths = 2 * np.pi * theta ** (np.arange(frequencies) / frequencies)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
