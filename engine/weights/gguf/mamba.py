"""How GGUF files hold Mamba-2 layers, and Granite's MLP, whose gate and up are one matrix of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engine.core.errors import ModelError
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.layer_reader import LayerReader
from engine.weights.stored_weights import OWN, Place


def mamba_config(metadata: Mapping[str, Any], architecture: str) -> dict[str, int]:
    """Return the sizes of a file's Mamba-2 layers by the names that most configurations have for them. Raises
    ModelError for sizes that contradict each other.
    """
    names = {"inner_size": 0, "time_step_rank": 0, "group_count": 0, "state_size": 0, "conv_kernel": 0}
    for name in names:
        names[name] = metadata.get(f"{architecture}.ssm.{name}", 0)
        if not isinstance(names[name], int) or names[name] < 1:
            raise ModelError(f"{architecture}.ssm.{name} is missing or no positive number; get the file again")
    inner, heads, groups = names["inner_size"], names["time_step_rank"], names["group_count"]
    for small, large, key in ((heads, inner, "inner_size"), (groups, heads, "time_step_rank")):
        if large % small:
            raise ModelError(f"{architecture}.ssm.{key} is {large}, no multiple of {small}; get the file again")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": names["state_size"],
        "mamba_d_conv": names["conv_kernel"],
    }


class MambaReader(LayerReader):
    """The parameters of a Mamba-2 layer."""

    def __init__(self, file: GgufFile, net: Any, prefix: str, block: str):
        """net: the stock model's, on the meta device."""
        super().__init__(file, prefix, block)
        for name, tensor in (("in_proj", "ssm_in"), ("out_proj", "ssm_out")):
            shape = getattr(net, name).out_features, getattr(net, name).in_features
            self.places[f"{prefix}{name}.weight"] = Place((self.found(f"{tensor}.weight", shape[::-1]),), shape)
        decay, channels = self.decay(net.num_heads), net.conv1d.out_channels
        self.vectors |= {f"{prefix}A_log": (-decay).log(), f"{OWN}{prefix}A_log": decay}
        self.vectors[f"{prefix}D"] = self.numbers("ssm_d", net.num_heads)
        self.vectors[f"{prefix}dt_bias"] = self.numbers("ssm_dt.bias", net.num_heads)
        self.vectors[f"{prefix}conv1d.weight"] = self.numbers("ssm_conv1d.weight", channels)[:, None]
        if net.conv1d.bias is not None:
            self.vectors[f"{prefix}conv1d.bias"] = self.numbers("ssm_conv1d.bias", channels)
        if hasattr(net.norm, "weight"):
            rows = net.num_heads * net.head_dim if net.n_groups == 1 else net.n_groups
            norm = self.numbers("ssm_norm.weight", rows).flatten()
            self.vectors[f"{prefix}norm.weight"] = norm.to(torch.bfloat16)


class SharedMlpReader(LayerReader):
    """The parameters of Granite's MLP, whose gate and up transformers has as one matrix. experts: whether it is beside
    some.
    """

    def __init__(self, file: GgufFile, mlp: Any, prefix: str, block: str, experts: bool):
        super().__init__(file, prefix, block)
        inner, hidden = mlp.hidden_size, mlp.input_size
        ending = "_shexp.weight" if experts else ".weight"
        parts = tuple(self.found(f"ffn_{name}{ending}", (hidden, inner)) for name in ("gate", "up"))
        self.places[f"{prefix}input_linear.weight"] = Place(parts, (2 * inner, hidden))
        for name, part in zip(("gate", "up"), parts, strict=True):
            self.places[f"{OWN}{prefix}{name}.weight"] = Place((part,), (inner, hidden))
        down = self.found(f"ffn_down{ending}", (inner, hidden))
        self.places[f"{prefix}output_linear.weight"] = Place((down,), (hidden, inner))
