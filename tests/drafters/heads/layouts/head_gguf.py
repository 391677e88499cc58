"""GGUF files of draft heads in the public layouts, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from tests.engine.weights.family_gguf import write_family
from tests.engine.weights.tiny_gguf import OF_LAYERS, add_values, write_all

_NAMES = {
    "fc": "fc",
    "norm": "output_norm",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_WHOLE = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
_BASES = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}
_FLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OF_LAYERS = OF_LAYERS | {
    "hidden_norm": "attn_norm_2",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}


def write_head(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: Kind = Kind.F32,
    changes: Mapping[str, Any] = MappingProxyType({}),
    scaling: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """kind: of the matrices. changes: of the metadata without the architecture before it; None leaves out. scaling: of
    Llama 3's positions.
    """
    arrays = _arrays(architecture, config, tensors)
    arrays |= {"rope_freqs.weight": llama3_factors(config, scaling)} if scaling else {}
    return str(write_file(path, architecture, _metadata(architecture, config, tensors) | changes, arrays, kind))


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    kind: Kind = Kind.F32,
) -> Path:
    """Write a GGUF file. metadata: without the architecture before it; None leaves out. kind: of the matrices."""
    writer = gguf.GGUFWriter(path, architecture)
    named = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": value for key, value in metadata.items()}
    add_values(writer, named)
    for name, array in arrays.items():
        of_kind = kind if array.ndim > 1 and array.dtype == np.float32 and array.shape[-1] % 32 == 0 else Kind.F32
        if array.dtype == np.int64:
            writer.add_tensor(name, array, raw_dtype=Kind.I64)
        else:
            writer.add_tensor(name, gguf.quantize(array, of_kind), raw_dtype=of_kind)
    write_all(writer)
    return path


def write_described(folder: Path, family: str, model: Any, **options: Any) -> Path:
    """Write a GGUF file of a model, and describe it in its folder."""
    write_family(folder / "x.gguf", family, model, Kind.Q8_0, **options)
    describe(read_gguf(folder / "x.gguf", "model=x"), folder, family, "")
    GgufSource.of(folder / "x.gguf", "x.gguf").write(folder)
    return folder / "x.gguf"


def llama3_factors(config: Mapping[str, Any], scaling: Mapping[str, float]) -> np.ndarray[Any, Any]:
    """Return what divides the frequencies, as the converter computes it."""
    dim, context = config["hidden_size"] // config["num_attention_heads"], scaling["original_max_position_embeddings"]
    freqs = 1.0 / (config["rope_parameters"]["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    factors = []
    for freq in freqs.tolist():
        length = 2 * np.pi / freq
        smooth = (context / length - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if length < context / high else factor if length > context / low else between)
    return np.array(factors, np.float32)


def _metadata(architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    made: dict[str, Any] = {
        "block_count": config.get("num_hidden_layers", 1),
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config.get("head_dim", hidden // heads),
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    if architecture != "dflash":
        named = config.get("eagle_aux_hidden_state_layer_ids")
        return made | {
            "rope.dimension_count": hidden // heads,
            "target_layers": named or [2, 3, 3],  # of six layers
            "target_hidden_size": config.get("target_hidden_size", hidden),
            "norm_before_residual": config.get("norm_before_residual", False),
            "norm_before_fc": config.get("norm_before_fc", False),
        }
    flash = config.get("dflash_config") or config
    made |= {
        "block_size": config["block_size"],
        "target_layers": [layer + 1 for layer in flash["target_layer_ids"]],
        "tokenizer.ggml.mask_token_id": flash["mask_token_id"],
        "attention.causal": config.get("causal"),
    }
    made |= {key: flash[key] for key in _FLASH_2 if key in flash}
    if window := config.get("sliding_window"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        made |= {"attention.sliding_window": window, "attention.sliding_window_pattern": slides}
    if "markov_head.markov_w1.weight" in tensors:
        made |= {"sample_from_anchor": True, "has_confidence_head": "confidence_head.proj.weight" in tensors}
    return made


def _arrays(
    architecture: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, np.ndarray[Any, Any]]:
    made = {}
    for name, tensor in tensors.items():
        if name == "d2t":
            made[name] = (tensor + torch.arange(len(tensor))).numpy()  # which are the target's ids
        elif name != "t2d":
            module, _, suffix = name.rpartition(".")
            if architecture == "eagle3" and module.endswith(("q_proj", "k_proj")):
                heads = config["num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"]
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            stored = _WHOLE.get(name) or _base(name) or f"{_stored_module(module)}.{suffix}"
            made[stored] = tensor.float().contiguous().numpy()
    return made


def _base(name: str) -> str | None:
    """Return the name of a convolution's base; None for other tensors."""
    _, index, part = f"{name}..".split(".", 2)
    return f"blk.{index}.{_BASES[part.rstrip('.')]}" if part.rstrip(".") in _BASES else None


def _stored_module(module: str) -> str:
    if module.startswith("midlayer."):
        module = f"layers.0.{module.removeprefix('midlayer.')}"
    if not module.startswith("layers."):
        return _NAMES[module]
    _, index, part = module.split(".", 2)
    return f"blk.{index}.{_OF_LAYERS[part]}"
