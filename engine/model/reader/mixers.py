"""Reads what makes a row of itself and the rows before it: attention, gated delta nets, short convolutions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from engine.kernels.simd import LANES
from engine.kernels.state.walk import MOST_TAPS
from engine.model.reader.parts import linear_structure, norm_structure, only
from engine.model.structure import (
    AttentionStructure,
    GatedDeltaStructure,
    LinearStructure,
    NormStructure,
    OtherStructure,
    Picked,
    ShortConvolutionStructure,
)
from engine.weights.stored_weights import OWN, StoredWeights

_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "rotary_emb"}
_OUT = ("o_proj", "out_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))


def attention_structure(
    attention: Any, prefix: str, heads: int, head_dim: int, rotated: int, rotary_table: int
) -> AttentionStructure:
    """heads: of queries. rotated, rotary_table: as in the structure, if the layer rotates at all."""
    out = next((name for name in _OUT if hasattr(attention, name)), _OUT[0])
    norms = next((names for names in _HEAD_NORMS if hasattr(attention, names[0])), None)
    only(attention, _ATTENTION | {out} | {*(norms or ())})
    rotated = rotated if getattr(attention, "use_rope", True) else 0
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    orders: tuple[Picked | None, ...] = ()
    gated = hasattr(attention, "q_proj") and len(attention.q_proj.weight) == 2 * heads * head_dim
    if gated:
        parts = (*parts, "q_proj")
        query, gate = (Picked(2 * head_dim, tuple(range(at, at + head_dim))) for at in (0, head_dim))
        orders = (query, None, None, gate)
    if _interleaved(attention):
        if norms or gated:
            raise OtherStructure("norms or gates of heads whose neighbouring dimensions are rotated")
        order = Picked(head_dim, (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)))
        orders = (order, order, None)
    query_norm, key_norm = (
        (norm_structure(getattr(attention, name), f"{prefix}{name}.") for name in norms) if norms else (None, None)
    )
    return AttentionStructure(
        qkv=linear_structure(attention, prefix, parts, "qkv_proj", orders),
        out=linear_structure(attention, prefix, (out,)),
        query_norm=query_norm,
        key_norm=key_norm,
        rotated=rotated,
        rotary_table=rotary_table,
        gated=gated,
    )


def gated_delta_structure(net: Any, prefix: str, stored: StoredWeights | None) -> GatedDeltaStructure:
    """stored: the weights of a file, which may hold value heads in an order of its own."""
    key_heads, value_heads, key_dim, value_dim = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    if value_heads % key_heads:
        raise OtherStructure(f"{value_heads} value heads, which are no multiple of {key_heads} key heads")
    _check_taps(net.conv1d.weight.shape[-1])
    if key_dim % LANES or value_dim % LANES:
        raise OtherStructure(f"a gated delta net with heads of {key_dim} and {value_dim}, which 16 does not divide")
    if net.conv1d.bias is not None or net.activation != "silu":
        raise OtherStructure("a gated delta net whose convolution has a bias or an activation of its own")

    def held(name: str) -> str:
        """The parameter as the file holds it, if that differs from the stock model's."""
        own = f"{OWN}{prefix}{name}"
        return own if stored is not None and stored.holds(own) else f"{prefix}{name}"

    each, decay, out = value_heads // key_heads, held("A_log"), held("out_proj.weight")
    tiled = out.startswith(OWN)
    return GatedDeltaStructure(
        inputs=_inputs(net, prefix, held),
        gates=_gates(net, prefix, held),
        convolution=held("conv1d.weight"),
        decay=decay,
        decay_is_log=not decay.startswith(OWN),
        dt_bias=held("dt_bias"),
        norm=NormStructure(f"{prefix}norm.weight", float(net.norm.variance_epsilon), False),
        out=LinearStructure((out,), ("",), (None,)),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=net.conv1d.weight.shape[-1],
        key_head_of=tuple(head % key_heads if tiled else head // each for head in range(value_heads)),
    )


def _inputs(net: Any, prefix: str, held: Callable[[str], str]) -> LinearStructure:
    """What makes q, k, v and z. A matrix of all four has those of each key head together."""
    parts = tuple(held(f"{name}.weight") for name in ("in_proj_qkv", "in_proj_z"))
    if hasattr(net, "in_proj_qkv") or parts[0].startswith(OWN):
        return LinearStructure(parts, ("", ""), (None, None))
    only(net, {"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"})
    values = net.num_v_heads // net.num_k_heads * net.head_v_dim
    return _runs(f"{prefix}in_proj_qkvz.weight", [net.head_k_dim, net.head_k_dim, values, values])


def _gates(net: Any, prefix: str, held: Callable[[str], str]) -> LinearStructure:
    """What makes b and a."""
    if hasattr(net, "in_proj_ba"):
        return _runs(f"{prefix}in_proj_ba.weight", [net.num_v_heads // net.num_k_heads] * 2)
    only(net, {"conv1d", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"})
    return LinearStructure((held("in_proj_b.weight"), held("in_proj_a.weight")), ("", ""), (None, None))


def _runs(weight: str, sizes: Sequence[int]) -> LinearStructure:
    """The first `sizes[0]` outputs of every run of the matrix, then the next of every run, and so on."""
    ends = [*accumulate(sizes)]
    orders = tuple(Picked(ends[-1], tuple(range(end - size, end))) for size, end in zip(sizes, ends, strict=True))
    return LinearStructure((weight,) * len(sizes), ("",) * len(sizes), orders)


def short_convolution_structure(layer: Any, prefix: str) -> ShortConvolutionStructure:
    only(layer, {"conv", "in_proj", "out_proj"})
    _check_taps(layer.conv.weight.shape[-1])
    return ShortConvolutionStructure(
        inputs=linear_structure(layer, prefix, ("in_proj",)),
        convolution=f"{prefix}conv.weight",
        bias="" if layer.conv.bias is None else f"{prefix}conv.bias",
        out=linear_structure(layer, prefix, ("out_proj",)),
        width=layer.conv.weight.shape[-1],
    )


def _check_taps(width: int) -> None:
    """Raise OtherStructure for a convolution that no kernel runs."""
    if width > MOST_TAPS:
        raise OtherStructure(f"a convolution over {width} rows, of which kernels read {MOST_TAPS} at most")


def _interleaved(attention: Any) -> bool:
    """Whether neighbouring dimensions of a head are rotated, not its halves."""
    rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    if rotate_half is None:
        raise OtherStructure(f"{type(attention).__name__} without rotate_half")
    found: list[float] = rotate_half(torch.arange(4.0)).tolist()
    if found not in ([-2.0, -3.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 2.0]):
        raise OtherStructure(f"{type(attention).__name__} rotates in a way of its own")
    return found[0] == -1
