"""Reads what makes a row of itself and the rows before it: attention, gated delta nets, short convolutions, Mamba-2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from engine.kernels.quant.layouts import STEP
from engine.kernels.simd import LANES
from engine.kernels.state.walk import MOST_TAPS
from engine.model.reader.parts import linear_structure, named_part, only, rms_structure
from engine.model.structure import (
    AttentionStructure,
    ChannelGatesStructure,
    GatedDeltaStructure,
    LinearStructure,
    MambaStructure,
    NormStructure,
    OtherStructure,
    Picked,
    ShortConvolutionStructure,
)
from engine.weights.stored_weights import OWN, StoredWeights

_OF_HEADS = "query_key_value"
"""A matrix that has the outputs of each head together: its query, its key and its value."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "rotary_emb", "v_norm", _OF_HEADS}
_OUT = ("o_proj", "out_proj", "dense")
_ROTATE_IN_WINDOWS = ("cohere2", "afmoe")
"""Families whose layers rotate only if they have a window. Their code says it, and no module."""
_NORMS_LAST = ("query_layernorm", "key_layernorm")  # which are applied after rotation
_SUB_NORM = "attn_sub_norm"
_GATES = ("g_proj", "gate_proj")
"""A matrix that makes one gate for each head, or one for each of its dimensions."""
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), _NORMS_LAST)


def attention_structure(
    attention: Any, prefix: str, config: Any, rotated: int, rotary_table: int, earlier: Mapping[int, Any]
) -> AttentionStructure:
    """config: of the model. rotated, rotary_table: as in the structure, if the layer rotates at
    all. earlier: the layers before it that attend, by their numbers.
    """
    out = next((name for name in _OUT if hasattr(attention, name)), _OUT[0])
    head_dim = getattr(attention, "head_dim", None) or head_sizes(config)[2]
    heads = getattr(attention, out).in_features // head_dim
    norms = next((names for names in _HEAD_NORMS if hasattr(attention, names[0])), None)
    only(attention, _ATTENTION | {out, _SUB_NORM, *_GATES} | {*(norms or ())})
    rotated = rotated if _rotates(attention, config) else 0
    keys_of = _keys_of(attention, earlier)
    parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj") if keys_of is None else ("q_proj",)
    same = keys_of is None and getattr(attention, "v_proj", attention) is None
    parts = parts[:2] if same else parts
    kv_heads = _kv_heads(attention if keys_of is None else earlier[keys_of], heads, head_dim)
    orders: tuple[Picked | None, ...] = ()
    gated = hasattr(attention, "q_proj") and len(attention.q_proj.weight) == 2 * heads * head_dim
    if gated:
        parts = (*parts, "q_proj")
        query, gate = (Picked(2 * head_dim, tuple(range(at, at + head_dim))) for at in (0, head_dim))
        orders = (query, None, None, gate)
    if (gates := getattr(attention, name := named_part(attention, _GATES), None)) is not None:
        own = [*attention.parameters(recurse=False)]  # such as a bias of the gates
        if gated or own or len(parts) != 3 or gates.out_features not in (heads, heads * head_dim):
            raise OtherStructure(f"{type(attention).__name__} with {name}")
        gated, parts = True, (*parts, name)
        if gates.out_features == heads:  # which are taken for each of their dimensions
            orders = (None, None, None, Picked(1, (0,) * head_dim))
    if hasattr(attention, _OF_HEADS):
        parts = (_OF_HEADS,) * 3
        orders = tuple(Picked(3 * head_dim, tuple(range(at * head_dim, (at + 1) * head_dim))) for at in range(3))
    if interleaved(attention):
        if norms or gated or orders:
            raise OtherStructure("norms or gates of heads whose neighbouring dimensions are rotated")
        order = Picked(head_dim, (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)))
        orders = (order, order, None)
    query_norm, key_norm = (
        None if norm is None else rms_structure(norm, f"{prefix}{name}.")
        for name in norms or ("", "")
        for norm in (getattr(attention, name, None),)
    )
    if (clip := float(getattr(config, "clip_qkv", None) or 0.0)) and norms:
        raise OtherStructure("queries and keys that are cut after their norms")
    return AttentionStructure(
        qkv=linear_structure(attention, prefix, parts, "qkv_proj", orders),
        out=linear_structure(attention, prefix, (out,)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        query_norm=query_norm,
        key_norm=key_norm,
        rotated=rotated,
        rotary_table=rotary_table,
        gated=gated,
        value_epsilon=_value_epsilon(attention, query_norm),
        values_are_keys=same,
        norms_last=norms == _NORMS_LAST and query_norm is not None,
        keys_of=keys_of,
        clip=clip,
        sub_norm=rms_structure(getattr(attention, _SUB_NORM), f"{prefix}{_SUB_NORM}.")
        if hasattr(attention, _SUB_NORM)
        else None,
    )


def _rotates(attention: Any, config: Any) -> bool:
    windows_alone = config.model_type in _ROTATE_IN_WINDOWS and getattr(attention, "sliding_window", None) is None
    return bool(getattr(attention, "use_rope", True)) and not windows_alone


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads, and the dimensions of one, where they are the same in all layers."""
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, head_dim


def _keys_of(attention: Any, earlier: Mapping[int, Any]) -> int | None:
    """Return the layer whose keys and values it reads: the last one of its type that has some."""
    if any(hasattr(attention, name) for name in ("k_proj", "qkv_proj", _OF_HEADS)):
        return None
    kind = getattr(attention, "layer_type", None)
    found = [at for at, one in earlier.items() if hasattr(one, "k_proj") and one.layer_type == kind]
    if kind is None or not found:
        raise OtherStructure(f"{type(attention).__name__} without k_proj")
    return found[-1]


def _kv_heads(attention: Any, heads: int, head_dim: int) -> int:
    if hasattr(attention, "k_proj"):
        return int(attention.k_proj.out_features) // head_dim
    every = getattr(attention, "qkv_proj", None) or getattr(attention, _OF_HEADS)
    return (int(every.out_features) // head_dim - heads) // 2


def _value_epsilon(attention: Any, query_norm: NormStructure | None) -> float:
    """Return the epsilon of a norm of values, which has no weights; 0 if there is no such norm."""
    if (norm := getattr(attention, "v_norm", None)) is None:
        return 0.0
    if [*norm.parameters()] or query_norm is None or query_norm.epsilon != norm.eps:
        raise OtherStructure(f"{type(attention).__name__} with a norm of values of its own kind")
    return float(norm.eps)


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

    held = partial(held_as, prefix, stored)
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


def channel_delta_structure(net: Any, prefix: str, stored: StoredWeights | None) -> GatedDeltaStructure:
    """Read a gated delta net each channel of whose keys decays by itself. stored: the weights of a file."""
    forget = net.forget_gate
    only(
        net,
        {"q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm", "o_proj"},
    )
    only(forget, {"f_a_proj", "f_b_proj"})
    heads, size, width = net.num_heads, net.head_dim, net.conv1d.weight.shape[-1]
    _check_taps(width)
    if size % STEP:
        raise OtherStructure(f"a delta net with heads of {size}, which {STEP} does not divide")
    if net.conv1d.bias is not None or net.activation != "silu" or net.o_norm.activation != "sigmoid":
        raise OtherStructure("a delta net with a bias or an activation of its own")
    if hasattr(forget, "safe_gate_lower_bound"):
        raise OtherStructure("a delta net whose decay has a limit")
    decay = held_as(prefix, stored, "forget_gate.A_log")
    of_forget = [linear_structure(forget, f"{prefix}forget_gate.", (name,)) for name in ("f_a_proj", "f_b_proj")]
    of_out = [linear_structure(net, prefix, (name,)) for name in ("g_a_proj", "g_b_proj")]
    return GatedDeltaStructure(
        inputs=linear_structure(net, prefix, ("q_proj", "k_proj", "v_proj")),
        gates=linear_structure(net, prefix, ("b_proj",)),
        convolution=f"{prefix}conv1d.weight",
        decay=decay,
        decay_is_log=not decay.startswith(OWN),
        dt_bias="",
        norm=NormStructure(f"{prefix}o_norm.weight", float(net.o_norm.variance_epsilon), False),
        out=linear_structure(net, prefix, ("o_proj",)),
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        width=width,
        key_head_of=tuple(range(heads)),
        by_channel=ChannelGatesStructure(
            (of_forget[0], of_forget[1]),
            (of_out[0], of_out[1]),
            f"{prefix}forget_gate.dt_bias",
            net.g_a_proj.out_features,
        ),
    )


def held_as(prefix: str, stored: StoredWeights | None, name: str) -> str:
    """Return the parameter of that name as the file holds it, if that differs from the stock model's."""
    own = f"{OWN}{prefix}{name}"
    return own if stored is not None and stored.holds(own) else f"{prefix}{name}"


def _inputs(net: Any, prefix: str, held: Callable[[str], str]) -> LinearStructure:
    """Return what makes q, k, v and z. A matrix of all four has those of each key head together."""
    parts = tuple(held(f"{name}.weight") for name in ("in_proj_qkv", "in_proj_z"))
    if hasattr(net, "in_proj_qkv") or parts[0].startswith(OWN):
        return LinearStructure(parts, ("", ""), (None, None))
    only(net, {"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"})
    values = net.num_v_heads // net.num_k_heads * net.head_v_dim
    return _runs(f"{prefix}in_proj_qkvz.weight", [net.head_k_dim, net.head_k_dim, values, values])


def _gates(net: Any, prefix: str, held: Callable[[str], str]) -> LinearStructure:
    """Return what makes b and a."""
    if hasattr(net, "in_proj_ba"):
        return _runs(f"{prefix}in_proj_ba.weight", [net.num_v_heads // net.num_k_heads] * 2)
    only(net, {"conv1d", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"})
    return LinearStructure((held("in_proj_b.weight"), held("in_proj_a.weight")), ("", ""), (None, None))


def _runs(weight: str, sizes: Sequence[int]) -> LinearStructure:
    """Return the first `sizes[0]` outputs of every run of the matrix, then the next of every run, and so on."""
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


def mamba_structure(net: Any, prefix: str, config: Any, stored: StoredWeights | None) -> MambaStructure:
    """config: of the model. stored: the weights of a file, which may hold parameters in its own way."""
    only(net, {"act", "conv1d", "in_proj", "norm", "out_proj"})
    heads, groups, head_dim, state_dim = net.num_heads, net.n_groups, net.head_dim, net.ssm_state_size
    _check_taps(net.conv1d.weight.shape[-1])
    if head_dim % LANES or state_dim % LANES or heads % groups:
        raise OtherStructure(
            f"Mamba-2 with {heads} heads of {head_dim} in {groups} groups of {state_dim}: kernels run groups of equal "
            "size, and sizes that 16 divides"
        )
    if net.activation != "silu":
        raise OtherStructure(f"Mamba-2 with the activation {net.activation}")
    decay = held_as(prefix, stored, "A_log")
    return MambaStructure(
        inputs=linear_structure(net, prefix, ("in_proj",)),
        convolution=f"{prefix}conv1d.weight",
        bias="" if net.conv1d.bias is None else f"{prefix}conv1d.bias",
        decay=decay,
        decay_is_log=not decay.startswith(OWN),
        dt_bias=f"{prefix}dt_bias",
        skip=f"{prefix}D",
        norm=_mamba_norm(net, f"{prefix}norm."),
        gate_last=bool(getattr(net.norm, "norm_before_gate", False)),
        out=linear_structure(net, prefix, ("out_proj",)),
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        state_dim=state_dim,
        width=net.conv1d.weight.shape[-1],
        steps=(float(net.time_step_limit[0]), float(net.time_step_limit[1])),
        scales=_mamba_scales(net, config),
    )


def _mamba_scales(net: Any, config: Any) -> tuple[float, float, float, float, float]:
    """Return what multiplies z, x, B, C and the step."""
    of_input, of_parts = float(getattr(net, "ssm_in_multiplier", 1.0)), getattr(config, "ssm_multipliers", [1.0] * 5)
    if of_input != 1 and net.in_proj.bias is not None:
        raise OtherStructure("Mamba-2 with biases and an input that is multiplied")
    z, x, b, c, step = (of_input * float(factor) for factor in of_parts)
    return z, x, b, c, step


def _mamba_norm(net: Any, prefix: str) -> NormStructure | None:
    """Return the norm of a group's numbers, None if there is none."""
    if isinstance(net.norm, nn.Identity):
        return None
    inner = net.num_heads * net.head_dim
    size = getattr(net.norm, "group_size", None) or inner // getattr(net.norm, "n_groups", 1)
    if size * net.n_groups != inner:
        raise OtherStructure(f"Mamba-2 with {net.n_groups} groups, whose norm is of {size} numbers")
    return NormStructure(f"{prefix}weight", float(net.norm.variance_epsilon), False)


def _check_taps(width: int) -> None:
    """Raise OtherStructure for a convolution that no kernel runs."""
    if width > MOST_TAPS:
        raise OtherStructure(f"a convolution over {width} rows, of which kernels read {MOST_TAPS} at most")


def interleaved(attention: Any) -> bool:
    """Return whether neighbouring dimensions of a head are rotated, not its halves."""
    module = sys.modules[type(attention).__module__]
    x, quarter = torch.arange(4.0), (torch.zeros(2), torch.ones(2))  # by which rotate_half alone is left
    if (rotate_half := getattr(module, "rotate_half", None)) is not None:
        found: list[float] = rotate_half(x).tolist()
    elif (apply := getattr(module, "_apply_rotary_emb", None)) is not None:
        found = apply(x, *quarter).tolist()
    elif hasattr(module, "apply_rotary_emb"):  # which multiplies complex numbers
        return True
    else:
        raise OtherStructure(f"{type(attention).__name__} without rotate_half")
    if found not in ([-2.0, -3.0, 0.0, 1.0], [-1.0, 0.0, -3.0, 2.0]):
        raise OtherStructure(f"{type(attention).__name__} rotates in a way of its own")
    return found[0] == -1
