"""Draft heads in GGUF files, as llama.cpp's converter writes them: `eagle3`, and `dflash`, which DSpark's are too.

A file becomes the configuration and the tensors of the public layout, under the file's own names (`stored_name`). What
the converter changed is changed back: `d2t` has the target's ids and not offsets, EAGLE-3's queries and keys have
neighbouring dimensions rotated, as Llama's have, and `target_layers` are those that hidden states enter, where DFlash
names the layers before them. Matrices in codes stay in the file until the head packs them in the same bits; other
tensors become numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.matrices import Matrix, file_matrix, numbers, some_of
from engine.core.errors import ModelError, shown
from engine.kernels.quant.stored import StoredMatrix
from engine.weights.draft_head import ARCHITECTURES
from engine.weights.gguf.file import GgufFile, read_gguf

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
"""Parts of a layer by their public names."""
_WHOLE = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "hidden_norm": "enc.output_norm",
    "input_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_ENDINGS = {
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
"""Ends of names that are no modules' weights."""
_FLASH_2 = {
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
}
"""Keys of a file by those of a configuration."""
_UNKNOWN = ("embedding_scale", "attention.scale", "attention.value_scale", "hyper_connection.count")
"""Keys that change what a head computes, of families whose heads are not read."""
_D2T, _T2D, _FACTORS, _BIAS = "d2t", "t2d", "rope_freqs.weight", "conf_proj.bias"
_SELECTOR = "selector_hidden.weight"
"""The tensor that marks a DFlash head as DFlash 2's."""


def stored_name(name: str) -> str:
    """Return the file's name for the tensor `name` of the public layout."""
    for ending, stored in _ENDINGS.items():
        if name.endswith(ending):
            begin = name.removesuffix(ending)
            return f"blk.{begin.removeprefix('layers.')}{stored}" if begin else stored
    module, _, suffix = name.rpartition(".")
    first, _, rest = module.partition(".")
    if first == "midlayer":
        return f"blk.0.{_LAYER.get(rest, rest)}.{suffix}"
    if first == "layers":
        index, _, part = rest.partition(".")
        return f"blk.{index}.{_LAYER.get(part, part)}.{suffix}"
    return f"{_WHOLE.get(module, module)}.{suffix}" if module else name


def read_head(path: str, method: str, field: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
    """Read the head of a file: its configuration and its tensors. field: the key that names it.

    Raises ModelError if the file is not of a head for that method, or says of it what is not read.
    """
    return _Head(read_gguf(Path(path), f"{field}={path}"), f"{field}={path}").read(method)


class _Head:
    """A file, and how errors begin that are about it."""

    def __init__(self, file: GgufFile, field: str):
        self.file, self.field = file, field

    def read(self, method: str) -> tuple[dict[str, Any], dict[str, Matrix]]:
        architecture = self.file.architecture
        if ARCHITECTURES.get(architecture) != method:
            raise ModelError(self._other(architecture, method))
        tensors = {tensor.name: self._read(tensor.name) for tensor in self.file.tensors}
        return _READ[architecture](self, tensors), tensors

    def _other(self, architecture: str, method: str) -> str:
        """Return what the file is, which is not a head for the method."""
        if (other := ARCHITECTURES.get(architecture)) is not None:
            return f"{self.field}: is a head for method {other}, not {method}; take method={other}"
        return (
            f"{self.field}: general.architecture is {shown(architecture)}, which is no head for method {method}; a "
            "smaller model drafts with method=sps, or with drafter.head=sps in a hybrid"
        )

    def eagle3(self, tensors: dict[str, Matrix]) -> dict[str, Any]:
        """Return the configuration, and put the rows of queries and keys back."""
        config = self._common(tensors)
        for name, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            if (weight := tensors.get(f"blk.0.{name}.weight")) is not None:
                tensors[f"blk.0.{name}.weight"] = self._halved(weight, config[heads], name)
        return config | {
            "target_hidden_size": self._count("target_hidden_size"),
            "eagle_aux_hidden_state_layer_ids": self._target_layers(),
            "norm_before_residual": bool(self._key("norm_before_residual", False)),
            "norm_before_fc": bool(self._key("norm_before_fc", False)),
        }

    def dflash(self, tensors: dict[str, Matrix]) -> dict[str, Any]:
        """Return the configuration of a DFlash head: DSpark's has a Markov head, DFlash 2's a selector."""
        config, markov, sure = self._common(tensors), tensors.get("markov_w1.weight"), tensors.get("conf_proj.weight")
        if sure is not None:
            sure = tensors["conf_proj.weight"] = numbers(sure).view(1, -1)
            tensors.setdefault(_BIAS, torch.zeros(1))
        from_anchor = markov is not None and bool(self._key("sample_from_anchor", True))
        return config | {
            "block_size": self._count("block_size"),
            "causal": self._key("attention.causal"),
            **self._windows(config["num_hidden_layers"]),
            "markov_rank": 0 if markov is None else markov.shape[-1],
            "enable_confidence_head": sure is not None,
            "confidence_head_with_markov": sure is not None and sure.numel() > config["hidden_size"],
            "dflash_config": {
                "target_layer_ids": [layer - 1 for layer in self._target_layers()],
                "mask_token_id": self.file.metadata.get("tokenizer.ggml.mask_token_id"),
                "draft_shift": from_anchor,
                **({name: self._key(key) for name, key in _FLASH_2.items()} if _SELECTOR in tensors else {}),
            },
        }

    def _windows(self, layers: int) -> dict[str, Any]:
        """Return which layers attend to the latest positions alone, and to how many."""
        if not (window := self._key("attention.sliding_window", 0)):
            return {}
        pattern = self.file.arrays.get(f"{self.file.architecture}.attention.sliding_window_pattern", ())
        if len(pattern) != layers:
            raise self._error("attention.sliding_window_pattern", f"is not of {layers} layers")
        types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": types}

    def _common(self, tensors: dict[str, Matrix]) -> dict[str, Any]:
        """Return the part of the configuration that all heads have, and put the vocabulary's offsets in place."""
        for key in _UNKNOWN:
            if self._key(key) is not None:
                raise self._error(key, "heads of such a family are not read")
        if (activation := self._key("hidden_activation", "silu")) != "silu":
            raise self._error("hidden_activation", f"{shown(activation)} is not supported, silu is")
        config: dict[str, Any] = {name: self._count(key) for name, key in SIZES.items()}
        head_dim = self._key("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
        if self._key("rope.dimension_count", head_dim) != head_dim:
            raise self._error("rope.dimension_count", f"of {head_dim} dimensions of a head, all have to be rotated")
        config |= {
            "head_dim": head_dim,
            "vocab_size": self._vocabulary(),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rotary(
                self._vector(tensors, _FACTORS), head_dim, config["max_position_embeddings"]
            ),
        }
        if (ids := tensors.get(_D2T)) is not None:
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
                raise ModelError(f"{self.field}: tensor d2t does not hold tokens; convert the head again")
            config["draft_vocab_size"] = len(ids)
            tensors[_D2T] = ids - torch.arange(len(ids))
            drafted = torch.zeros(config["vocab_size"], dtype=torch.bool)
            drafted[ids[(ids >= 0) & (ids < len(drafted))]] = True
            tensors[_T2D] = drafted
        return config

    def _rotary(self, factors: Tensor | None, head_dim: int, context: int) -> dict[str, Any]:
        """Return the positions' parameters. factors: that divide the frequencies, if the file has them."""
        rope = {"rope_type": "default", "rope_theta": self._key("rope.freq_base", 10_000.0)}
        kind = self._key("rope.scaling.type", "none")
        if factors is not None:
            if factors.shape != (head_dim // 2,):
                raise ModelError(f"{self.field}: tensor {_FACTORS} is not of {head_dim // 2} numbers; get it again")
            return rope | {
                "rope_type": "longrope",
                "short_factor": factors.tolist(),
                "long_factor": factors.tolist(),
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
            }
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise self._error("rope.scaling.type", f"{shown(kind)} is not supported, none, linear and yarn are")
        rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            given = {
                "original_max_position_embeddings": "original_context_length",
                "beta_fast": "yarn_beta_fast",
                "beta_slow": "yarn_beta_slow",
                "attention_factor": "yarn_attn_factor",
            }
            rope |= {name: found for name, key in given.items() if (found := self._key(f"rope.scaling.{key}"))}
        return rope

    def _halved(self, weight: Matrix, heads: int, name: str) -> Matrix:
        """Return the rows of queries or keys as the public layout has them: the first of each pair that is rotated
        together, then the second.
        """
        if (rows := weight.shape[0]) % (2 * heads):
            raise ModelError(f"{self.field}: tensor blk.0.{name}.weight has {rows} rows for {heads} heads")
        return some_of(weight, torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten())

    def _vocabulary(self) -> int:
        """Return the size of the target's vocabulary."""
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        return int(self._key("vocab_size") or tokens or self._count("vocab_size"))

    def _target_layers(self) -> list[int]:
        """Return the layers of the target whose inputs the head reads."""
        layers = self.file.arrays.get(key := f"{self.file.architecture}.target_layers")
        if not layers or not all(isinstance(layer, int) for layer in layers):
            raise ModelError(f"{self.field}: {key} names no layers; convert the head again")
        return list(layers)

    def _key(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{key}", default)

    def _number(self, key: str) -> float:
        value = self._key(key)
        if not isinstance(value, int | float) or value <= 0:
            raise self._error(key, f"{shown(value)} is not a positive number")
        return value

    def _count(self, key: str) -> int:
        value = self._key(key)
        if not isinstance(value, int) or value < 1:
            raise self._error(key, f"{shown(value)} is not a positive count")
        return value

    def _error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.field}: {self.file.architecture}.{key}: {problem}; convert the head again")

    def _vector(self, tensors: dict[str, Matrix], name: str) -> Tensor | None:
        """Take a tensor of numbers out, if it is there."""
        return None if (found := tensors.pop(name, None)) is None else numbers(found)

    def _read(self, name: str) -> Matrix:
        """Return a tensor in torch's order of dimensions."""
        tensor = self.file.tensor(name)
        assert tensor is not None
        if (matrix := file_matrix(self.file, tensor)) is not None:
            return matrix
        kind, raw, shape = tensor.kind.name, self.file.read(tensor), tensor.shape[::-1]
        if kind in _INTEGERS:
            return torch.from_numpy(raw.view(_INTEGERS[kind]).copy()).long().view(shape)
        wide = torch.float32 if kind in ("F32", "F16") else torch.bfloat16
        try:
            return StoredMatrix.of(kind, raw, tensor.shape[0]).values(wide).view(shape)
        except (NotImplementedError, KeyError, ValueError):
            raise ModelError(
                f"{self.field}: tensor {name} is of type {kind}, which is not read; take another quantisation"
            ) from None


_INTEGERS = {"I32": "<i4", "I64": "<i8"}
_READ: dict[str, Callable[[_Head, dict[str, Matrix]], dict[str, Any]]] = {
    "eagle3": _Head.eagle3,
    "dflash": _Head.dflash,
}
