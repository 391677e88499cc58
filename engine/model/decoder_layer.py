"""The weights of a stock model of a known structure (`engine.model.decoder`), a layer at a time.

What a layer is made of is read from its modules, and what a module computes by trying it: never from a family's name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import Activations
from engine.kernels.gemm.product import Product
from engine.kernels.layer.weights import ExpertMlp, GatedMlp, LayerWeights, Norm
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES


class Matrices(Protocol):
    """Where the matrices that parameters of the stock model stand for are."""

    def matrix(self, parameter: Tensor) -> Tensor | StoredMatrix: ...
    def experts(self, parameter: Tensor) -> Sequence[Tensor | Sequence[StoredMatrix]]:
        """For each expert, its matrix or the parts of it."""
        ...


class InMemory:
    """The parameters themselves."""

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter

    def experts(self, parameter: Tensor) -> Sequence[Tensor]:
        return list(parameter)


_NORMS = (  # names of a layer's norms: before attention, of its result, before the MLP, of its result
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
)
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


class OtherStructure(Exception):
    """The model does not have a structure that the lean decoder knows. Its text says what is unknown."""


class Layer:
    """One layer's weights, as a program takes them. rotated: dimensions of a head that are rotated, by that table.

    products: every matrix that a row is multiplied with; of experts, as many as a row has. idle_bytes: of the others.
    activations: how matrices in blocks take their rows.
    """

    def __init__(
        self,
        layer: Any,
        matrices: Matrices,
        activations: Activations,
        head_dim: int,
        rotated: int,
        rotary_table: int,
    ):
        attention, self.idle_bytes, self._activations = layer.self_attn, 0, activations
        rest = {name for name, _ in layer.named_children()} - {"resid_attn_dropout", "resid_mlp_dropout"}
        names = next((names for names in _NORMS if rest - {"self_attn", "mlp"} == {*names} - {""}), None)
        if names is None:
            raise OtherStructure(f"a layer of {', '.join(sorted(rest))}")
        only(attention, _ATTENTION)
        norms = [norm_of(getattr(layer, name)) if name else None for name in names]
        normed = hasattr(attention, "q_norm")
        rotated = rotated if getattr(attention, "use_rope", True) else 0
        order = _halves(head_dim, rotated) if _interleaved(attention) else None
        if order is not None and normed:
            raise OtherStructure("norms of heads whose neighbouring dimensions are rotated")
        orders = None if order is None else (order, order, None)
        qkv = joined(matrices, attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj", False, orders, activations)
        out = joined(matrices, attention, ("o_proj",), activations=activations)
        mlp, of_mlp = self._mlp(layer.mlp, matrices)
        self.products: tuple[Product, ...] = (qkv, out, *of_mlp)
        self.weights = LayerWeights(
            qkv=qkv,
            out=out,
            mlp=mlp,
            input_norm=norms[0],
            out_norm=norms[1],
            inner_norm=norms[2],
            down_norm=norms[3],
            residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
            query_norm=norm_of(attention.q_norm) if normed else None,
            key_norm=norm_of(attention.k_norm) if normed else None,
            rotated=rotated,
            rotary_table=rotary_table,
        )
        if len({norm.epsilon for norm in norms if norm is not None}) > 1:
            raise OtherStructure("norms of a layer with different epsilons")

    def _mlp(self, mlp: Any, matrices: Matrices) -> tuple[GatedMlp | ExpertMlp, list[Product]]:
        """The MLP or the experts, and the matrices that a row is multiplied with."""
        if hasattr(mlp, "experts"):
            return self._experts(mlp, matrices)
        only(mlp, _MLP)
        gelu = _is_gelu(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
        take = self._activations
        gate_up = joined(matrices, mlp, ("gate_proj", "up_proj"), "gate_up_proj", not gelu, activations=take)
        down = joined(matrices, mlp, ("down_proj",), activations=take)
        return GatedMlp(gate_up, down, down.inputs, gate_up.gated, gelu), [gate_up, down]

    def _experts(self, mlp: Any, matrices: Matrices) -> tuple[ExpertMlp, list[Product]]:
        only(mlp, {"gate", "experts"})
        router, experts = mlp.gate, mlp.experts
        parts = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]}
        shapes = {name: weight.shape for name, weight in experts.named_parameters()}
        if parts != {"weight"} or shapes.keys() != {"gate_up_proj", "down_proj"}:
            raise OtherStructure("experts or a router with parts of their own")
        (count, hidden), (_, _, inner) = router.weight.shape, shapes["down_proj"]
        whole = shapes["gate_up_proj"] == (count, 2 * inner, hidden) and hidden % 32 == inner % 32 == 0
        if not whole or _is_gelu(experts.act_fn):
            raise OtherStructure("experts that are not gated by SiLU, or of sizes that 32 does not divide")
        take = self._activations
        gate_up = [Product(matrix, None, True, take) for matrix in matrices.experts(experts.gate_up_proj)]
        down = [Product(matrix, None, False, take) for matrix in matrices.experts(experts.down_proj)]
        multiplied = [[p.matmul for p in products if p.matmul is not None] for products in (gate_up, down)]
        if not all(len(matmuls) == count for matmuls in multiplied):
            raise OtherStructure("experts, which this processor cannot multiply apart")
        if not all(product.gated for product in gate_up):
            raise OtherStructure("experts whose gate and up projections are stored as different types")
        found = matrices.matrix(router.weight)
        of_router = Product(found if isinstance(found, Tensor) else [found])
        chosen = int(router.top_k)
        self.idle_bytes = sum(product.bytes for product in [*gate_up[chosen:], *down[chosen:]])
        normalised = bool(getattr(router, "norm_topk_prob", True))
        mixed = ExpertMlp(of_router, multiplied[0], multiplied[1], inner, chosen, normalised)
        return mixed, [of_router, *gate_up[:chosen], *down[:chosen]]


def only(module: Any, names: set[str]) -> None:
    """Raises OtherStructure if the module has other parts than these."""
    if others := {name for name, _ in module.named_children()} - names:
        raise OtherStructure(f"{type(module).__name__} with {', '.join(sorted(others))}")


def joined(
    matrices: Matrices,
    module: Any,
    parts: tuple[str, ...],
    whole: str = "",
    gated: bool = False,
    orders: Sequence[Tensor | None] | None = None,
    activations: Activations = "bfloat16",
) -> Product:
    """One product that replaces several over the same input.

    orders: for each of the parts, the order of the outputs within each run of as many outputs; None: as they are.
    activations: how it takes its rows, if it is in blocks.
    """
    linears: list[Any] = [getattr(module, name, None) for name in ((whole,) if hasattr(module, whole) else parts)]
    if not all(type(linear) is nn.Linear for linear in linears) or (orders and len(orders) != len(linears)):
        raise OtherStructure(f"{type(module).__name__} without {', '.join(parts)}")
    bias = None
    if any(linear.bias is not None for linear in linears):
        zeros = (torch.zeros(m.out_features, dtype=m.weight.dtype) for m in linears)
        biases = [zero if m.bias is None else m.bias for m, zero in zip(linears, zeros, strict=True)]
        bias = torch.cat([_ordered(part, order) for part, order in zip(biases, _each(orders, linears), strict=True)])
    found = [matrices.matrix(linear.weight) for linear in linears]
    weights = [_ordered(part, order) for part, order in zip(found, _each(orders, linears), strict=True)]
    stored = [part for part in weights if isinstance(part, StoredMatrix)]
    if stored:  # a file holds all matrices of a model
        return Product(stored, bias, gated, activations)
    return Product(weights[0] if len(weights) == 1 else torch.cat(weights), bias, gated)


def _each(orders: Sequence[Tensor | None] | None, parts: Sequence[Any]) -> Sequence[Tensor | None]:
    return [None] * len(parts) if orders is None else orders


def _ordered(part: Any, order: Tensor | None) -> Any:
    """A tensor or a matrix of a file, with the outputs of each run of `len(order)` in that order."""
    if order is None:
        return part
    whole = torch.arange(part.shape[0]).unflatten(0, (-1, len(order)))[:, order].flatten()
    return part.reordered(whole.numpy()) if isinstance(part, StoredMatrix) else part[whole]


def norm_of(norm: Any) -> Norm:
    """An RMSNorm of the model."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or epsilon is None or getattr(norm, "bias", None) is not None:
        raise OtherStructure(f"{type(norm).__name__} is not an RMSNorm with a weight")
    kind: Any = type(norm)
    factors = weight.detach().float() + (1 if _adds_one(kind) else 0)
    return Norm(factors.contiguous(), float(epsilon))


@cache
def _adds_one(kind: Any) -> bool:
    """Whether norms of that kind multiply by 1 + weight."""
    try:
        with torch.device("cpu"):
            norm: Any = kind(LANES)
            norm.weight.data.zero_()
            return bool(norm(torch.ones(1, LANES)).any())
    except TypeError as error:
        raise OtherStructure(f"{kind.__name__} is made in another way than RMSNorm") from error


def _is_gelu(activation: Any) -> bool:
    """Whether that is GELU's tanh approximation; False: SiLU."""
    x = torch.linspace(-4, 4, 65)
    for found, gelu in ((F.silu(x), False), (F.gelu(x, approximate="tanh"), True)):
        if activation is not None and torch.allclose(activation(x), found, rtol=0, atol=1e-5):
            return gelu
    raise OtherStructure(f"the activation {type(activation).__name__}")


def _interleaved(attention: Any) -> bool:
    """Whether neighbouring dimensions of a head are rotated, not its halves."""
    rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    if rotate_half is None:
        raise OtherStructure(f"{type(attention).__name__} without rotate_half")
    found: list[float] = rotate_half(torch.arange(4.0)).tolist()
    if found not in ([-2.0, -3.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 2.0]):
        raise OtherStructure(f"{type(attention).__name__} rotates in a way of its own")
    return found[0] == -1


def _halves(head_dim: int, rotated: int) -> Tensor:
    """[head_dim] the order in which the halves of the first `rotated` dimensions were neighbours."""
    first = torch.arange(rotated).view(-1, 2).T.flatten()
    return torch.cat([first, torch.arange(rotated, head_dim)])
