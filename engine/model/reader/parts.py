"""Reads the smallest parts of a stock model: its linear layers, norms and activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.layer.activation import Activation
from engine.kernels.simd import LANES
from engine.model.reader.ternary import is_ternary
from engine.model.structure import LinearStructure, NormStructure, OtherStructure, Picked

_BASES = ("model", "gpt_neox")
_SMALL = 1e-2


def text_part(model: Any) -> tuple[Any, str]:
    """Return the decoder of a model that may also read images, and how the names of its parameters begin."""
    name = next((name for name in _BASES if hasattr(model, name)), _BASES[0])
    base: Any = getattr(model, name, None)
    if hasattr(base, "language_model"):
        return base.language_model, f"{name}.language_model."
    return base, f"{name}."


def named_part(module: Any, names: tuple[str, ...]) -> str:
    """Return the first of these names that a part of the module has; the first of all if none has one."""
    return next((name for name in names if getattr(module, name, None) is not None), names[0])


def only(module: Any, names: set[str]) -> None:
    """Raises OtherStructure if the module has other parts than these."""
    if others := {name for name, _ in module.named_children()} - names:
        raise OtherStructure(f"{type(module).__name__} with {', '.join(sorted(others))}")


def linear_structure(
    module: Any, prefix: str, parts: tuple[str, ...], whole: str = "", orders: tuple[Picked | None, ...] = ()
) -> LinearStructure:
    """Return the parts of the module, or the one that is all of them, as one."""
    names = (whole,) if hasattr(module, whole) else parts
    linears: list[Any] = [getattr(module, name, None) for name in names]
    rounds = all(is_ternary(one) for one in linears)
    other = next((type(one).__name__ for one in linears if one is not None and type(one) is not nn.Linear), None)
    if other is not None and not rounds:
        raise OtherStructure(f"{type(module).__name__} with {other}, which is no plain linear layer")
    if None in linears or (orders and len(orders) != len(linears)):
        raise OtherStructure(f"{type(module).__name__} without {', '.join(parts)}")
    weights = tuple(f"{prefix}{name}.weight" for name in names)
    biases = tuple("" if m.bias is None else f"{prefix}{name}.bias" for m, name in zip(linears, names, strict=True))
    return LinearStructure(weights, biases, orders or (None,) * len(names), rounds)


def rms_structure(norm: Any, prefix: str) -> NormStructure:
    """Return an RMSNorm of the model, where nothing else is computed. Raises OtherStructure if it is none."""
    found = norm_structure(norm, prefix)
    if found.centred or found.bias:
        raise OtherStructure(f"{prefix.removesuffix('.') or 'a norm'}: a LayerNorm in the place of an RMSNorm")
    return found


def norm_structure(norm: Any, prefix: str) -> NormStructure:
    """Return a norm of the model, RMSNorm or LayerNorm. Raises OtherStructure if it is neither."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None and hasattr(norm, "normalized_shape") and not [*norm.parameters()]:
        return _bare_norm(norm)
    if weight is None or epsilon is None:
        raise OtherStructure(f"{type(norm).__name__} is not a norm with a weight")
    bias = getattr(norm, "bias", None)
    kind: Any = type(norm)
    return NormStructure(
        f"{prefix}weight",
        float(epsilon),
        _adds_one(kind),
        _is_centred(kind),
        f"{prefix}bias" if bias is not None else "",
    )


def _bare_norm(norm: Any) -> NormStructure:
    """Return a norm without a weight, by what it makes of small numbers: what is divided by is sqrt(x^2 + epsilon)."""
    [width] = norm.normalized_shape
    with torch.device("cpu"):
        small = torch.tensor([_SMALL, -_SMALL]).repeat(width // 2)[None]
        epsilon = float((_SMALL / norm(small)[0, 0]) ** 2 - _SMALL**2)
        centred = not bool(norm(torch.ones(1, width)).any())
    return NormStructure("", float(f"{epsilon:.3g}"), False, centred, width=width)


@cache
def _adds_one(kind: Any) -> bool:
    """Return whether norms of that kind multiply by 1 + weight."""
    return _leaves_of_ones(kind, 0.0)


@cache
def _is_centred(kind: Any) -> bool:
    """Return whether norms of that kind subtract the mean: of equal numbers nothing is left."""
    return not _leaves_of_ones(kind, 1.0)


def _leaves_of_ones(kind: Any, weight: float) -> bool:
    """Return whether a norm of that kind, whose weights are all equal to `weight`, leaves anything of equal numbers."""
    try:
        with torch.device("cpu"):
            norm: Any = kind(LANES)
            norm.weight.data.fill_(weight)
            return bool(norm(torch.ones(1, LANES)).any())
    except TypeError as error:
        raise OtherStructure(f"{kind.__name__} is made in another way than RMSNorm") from error


def activation_of(activation: Any) -> Activation:
    """Return what a module applies. Raises OtherStructure if no kernel does."""
    x = torch.linspace(-4, 4, 65)
    for found, known in _ACTIVATIONS.items():
        if activation is not None and torch.allclose(activation(x), known(x), rtol=0, atol=1e-5):
            return found
    raise OtherStructure(f"the activation {type(activation).__name__}")


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: partial(F.gelu, approximate="tanh"),
    Activation.SQUARED_RELU: lambda x: F.relu(x).square(),
    Activation.ERF_GELU: F.gelu,
}
