"""The weights of a stock model of the common structure (`engine.model.decoder`), a layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.gemm.packed_linear import Product
from engine.kernels.quant.stored import StoredMatrix

Matrices = Callable[[Tensor], Tensor | StoredMatrix]
"""The matrix that a parameter of the stock model stands for: itself, or that of a file."""


class OtherStructure(Exception):
    """The model does not have the common structure."""


class Layer:
    """One layer's weights: four products, and the scales of its norms as float32."""

    def __init__(self, layer: Any, matrices: Matrices):
        parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        only(layer, parts | {"resid_attn_dropout", "resid_mlp_dropout"})
        attention, mlp = layer.self_attn, layer.mlp
        only(attention, {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"})
        only(mlp, {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"})
        self.qkv = joined(matrices, attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        self.out = joined(matrices, attention, ("o_proj",))
        self.gate_up = joined(matrices, mlp, ("gate_proj", "up_proj"), "gate_up_proj", gated=True)
        self.down = joined(matrices, mlp, ("down_proj",))
        self.input_norm, self.epsilon = scale_of(layer.input_layernorm)
        self.inner_norm, _ = scale_of(layer.post_attention_layernorm)
        self.query_norm = self.key_norm = None
        if hasattr(attention, "q_norm"):
            (self.query_norm, _), (self.key_norm, _) = scale_of(attention.q_norm), scale_of(attention.k_norm)
        self.inner = self.gate_up.outputs // 2

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def only(module: Any, names: set[str]) -> None:
    """Raises OtherStructure if the module has other parts than these."""
    if {name for name, _ in module.named_children()} - names:
        raise OtherStructure


def joined(matrices: Matrices, module: Any, parts: tuple[str, ...], whole: str = "", gated: bool = False) -> Product:
    """One product that replaces several over the same input."""
    linears: list[Any] = [getattr(module, name, None) for name in ((whole,) if hasattr(module, whole) else parts)]
    if not all(type(linear) is nn.Linear for linear in linears):
        raise OtherStructure
    biases = [linear.bias for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                b if b is not None else torch.zeros(m.out_features, dtype=m.weight.dtype)
                for b, m in zip(biases, linears, strict=True)
            ]
        )
    found = [matrices(linear.weight) for linear in linears]
    stored = [part for part in found if isinstance(part, StoredMatrix)]
    if stored:  # a file holds all matrices of a model
        return Product(stored, bias, gated)
    weights = [part for part in found if isinstance(part, Tensor)]
    return Product(weights[0] if len(weights) == 1 else torch.cat(weights), bias, gated)


def scale_of(norm: Any) -> tuple[Tensor, float]:
    """An RMSNorm's weight, as float32, and its epsilon."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or epsilon is None or getattr(norm, "bias", None) is not None:
        raise OtherStructure
    return weight.detach().float().contiguous(), float(epsilon)
