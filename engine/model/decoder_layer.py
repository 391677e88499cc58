"""The weights of a stock model of the common structure (`engine.model.decoder`), a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.config import Activations
from engine.kernels.gemm.packed_linear import Product
from engine.kernels.layer.program import LayerWeights, Norm
from engine.kernels.quant.stored import StoredMatrix

Matrices = Mapping[int, StoredMatrix]


class OtherStructure(Exception):
    """The model does not have the common structure."""


class Layer:
    """One layer's weights, as a program takes them, and its products. rotated: dimensions of a head that are."""

    def __init__(self, layer: Any, quantised: Matrices, rotated: int, activations: Activations):
        parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        only(layer, parts | {"resid_attn_dropout", "resid_mlp_dropout"})
        attention, mlp = layer.self_attn, layer.mlp
        only(attention, {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"})
        only(mlp, {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"})
        qkv = joined(quantised, activations, attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        out = joined(quantised, activations, attention, ("o_proj",))
        gate_up = joined(quantised, activations, mlp, ("gate_proj", "up_proj"), "gate_up_proj", gated=True)
        down = joined(quantised, activations, mlp, ("down_proj",))
        normed = hasattr(attention, "q_norm")
        self.products = qkv, out, gate_up, down
        self.weights = LayerWeights(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            inner=gate_up.outputs // 2,
            gated=gate_up.gated,
            input_norm=norm_of(layer.input_layernorm),
            inner_norm=norm_of(layer.post_attention_layernorm),
            query_norm=norm_of(attention.q_norm) if normed else None,
            key_norm=norm_of(attention.k_norm) if normed else None,
            rotated=rotated,
        )


def only(module: Any, names: set[str]) -> None:
    """Raises OtherStructure if the module has other parts than these."""
    if {name for name, _ in module.named_children()} - names:
        raise OtherStructure


def joined(
    quantised: Matrices,
    activations: Activations,
    module: Any,
    parts: tuple[str, ...],
    whole: str = "",
    gated: bool = False,
) -> Product:
    """One product that replaces several over the same input."""
    linears: list[Any] = [getattr(module, name, None) for name in ((whole,) if hasattr(module, whole) else parts)]
    if not all(type(linear) is nn.Linear for linear in linears):
        raise OtherStructure
    biases = [linear.bias for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [b if b is not None else m.weight.new_zeros(m.out_features) for b, m in zip(biases, linears, strict=True)]
        )
    weights = [linear.weight for linear in linears]
    stored = [quantised.get(weight.data_ptr()) for weight in weights]
    if any(matrix is not None for matrix in stored):
        found = [m or StoredMatrix.of_numbers(weight) for m, weight in zip(stored, weights, strict=True)]
        return Product(found, bias, gated, activations, weights[0].dtype)
    return Product(weights[0] if len(weights) == 1 else torch.cat(weights), bias, gated)


def norm_of(norm: Any) -> Norm:
    """An RMSNorm of the model."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or epsilon is None or getattr(norm, "bias", None) is not None:
        raise OtherStructure
    return Norm(weight.detach().float().contiguous(), float(epsilon))
