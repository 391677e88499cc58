"""Writes EAGLE-3 heads as llama.cpp's converter does: files that `drafters.heads.layouts.llama_cpp` reads.

Nothing is rounded: matrices in codes of 8 bits become Q8_0, which has the same codes and scales, others keep their
type. The tokenizer is the target's own, copied from its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from drafters.heads.layouts.llama_cpp import SIZES, stored_name
from engine.kernels.quant.nearest import q8_0_rows

_ARCHITECTURE = "eagle3"
_KINDS = {torch.bfloat16: Kind.BF16, torch.float16: Kind.F16, torch.float32: Kind.F32}
_ROTATED = {"self_attn.q_proj.weight": "num_attention_heads", "self_attn.k_proj.weight": "num_key_value_heads"}


def write_eagle3(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    codes: Mapping[str, tuple[Tensor, Tensor]],
    factors: Tensor | None,
    target: Path,
) -> None:
    """Write a head. config, tensors: of the public layout, whole. codes: of the tensors that are held in 8 bits, with
    their scales; factors: [head_dim / 2], that divide the rotary frequencies; target: its GGUF file.
    """
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    _add_metadata(writer, config)
    for key, field in gguf.GGUFReader(target).fields.items():
        if key.startswith("tokenizer.") and (value := field.contents()) != []:  # gguf writes no empty array
            writer.add_key_value(key, value, field.types[0], field.types[1] if field.types[1:] else None)
    for name, tensor in tensors.items():
        if name == "d2t":
            writer.add_tensor(name, (tensor.long() + torch.arange(len(tensor))).numpy())  # the target's ids
        elif name != "t2d":
            kind, rows = _stored(tensor, codes.get(name))
            if heads := _ROTATED.get(name.removeprefix("midlayer.")):
                rows = _in_pairs(rows, config[heads])
            writer.add_tensor(stored_name(name), rows, raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    for name, key in SIZES.items():
        writer.add_uint32(f"{_ARCHITECTURE}.{key}", 1 if name == "num_hidden_layers" else config[name])
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        writer.add_uint32(f"{_ARCHITECTURE}.{key}", config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_array(f"{_ARCHITECTURE}.target_layers", config["eagle_aux_hidden_state_layer_ids"])
    writer.add_uint32(f"{_ARCHITECTURE}.target_hidden_size", config["target_hidden_size"])
    for key in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"{_ARCHITECTURE}.{key}", bool(config.get(key, False)))


def _stored(tensor: Tensor, codes: tuple[Tensor, Tensor] | None) -> tuple[Kind, NDArray[Any]]:
    """Return a tensor's type in the file, and its rows of that type: norms have 32 bits."""
    if codes is not None and codes[1].dtype == torch.float16:
        return Kind.Q8_0, q8_0_rows(*codes)
    kind = Kind.F32 if tensor.dim() == 1 else _KINDS[tensor.dtype]
    return kind, gguf.quantize(tensor.float().numpy(), kind)


def _in_pairs(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the rows of queries or keys as llama.cpp rotates them: those of a pair stand beside each other."""
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)
