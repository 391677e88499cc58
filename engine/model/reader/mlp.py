"""Reads what a layer applies to each row by itself: an MLP, or experts."""

from __future__ import annotations

from typing import Any

import msgspec
from torch import nn

from engine.kernels.layer.activation import Activation
from engine.kernels.quant.layouts import STEP
from engine.model.reader.mixers import held_as
from engine.model.reader.parts import activation_of, linear_structure, named_part, only, rms_structure
from engine.model.reader.router import CORRECTION, routing_of, scale_of
from engine.model.structure import ExpertsStructure, LinearStructure, MlpStructure, NormStructure, OtherStructure
from engine.weights.stored_weights import OWN, StoredWeights

ALONE = "mixer"  # of layers that have a mixer or an MLP alone, which of the two
MLPS = ("block_sparse_moe", "mlp", "feed_forward", "shared_mlp", ALONE)
_SHARED_MLP = "shared_mlp"  # beside experts, every row's
_PROJECTIONS = (  # gate, up, down, and what the first two are called if they are one
    ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    ("w1", "w3", "w2", ""),
    ("gate", "up", "output_linear", "input_linear"),
)
_PLAIN = (  # up, down, of MLPs without a gate
    ("up_proj", "down_proj"),
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
_XIELU = ("alpha_p", "alpha_n")  # of which softplus is taken; the rest of it is proved
_SHARED = (("shared_expert", "shared_expert_gate"), ("shared_experts", ""))  # and their gates
_SUB_NORM = "ffn_sub_norm"
_BESIDE = "router", "experts"  # of a layer whose MLP is beside them
_NORMS_BESIDE = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
EXPERTS_BESIDE = {*_BESIDE, *_NORMS_BESIDE}
_EXPERT_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def mlp_of(layer: Any, prefix: str, stored: StoredWeights | None) -> MlpStructure | ExpertsStructure:
    """Read the MLP of a layer, or its experts. stored: the weights of a file."""
    name = named_part(layer, MLPS)
    mlp, beside = getattr(layer, name), getattr(layer, _SHARED_MLP, None)
    if hasattr(layer, _BESIDE[1]):
        return _experts_beside(layer, prefix, _gated_mlp(mlp, f"{prefix}{name}.", stored))
    if not hasattr(mlp, "experts"):
        return _gated_mlp(mlp, f"{prefix}{name}.", stored)
    found = _experts(mlp, f"{prefix}{name}.")
    if beside is None:
        return found
    shared = _gated_mlp(beside, f"{prefix}{_SHARED_MLP}.", stored)
    return msgspec.structs.replace(found, shared=shared, shared_gate=False)


def _experts_beside(layer: Any, prefix: str, shared: MlpStructure) -> ExpertsStructure:
    """Read experts beside the layer's MLP, with norms of their own. What of the router is no matrix is proved."""
    router, experts = (getattr(layer, name) for name in _BESIDE)
    only(router, {"norm", "proj"})
    norms = [rms_structure(getattr(layer, name), f"{prefix}{name}.") for name in _NORMS_BESIDE]
    scale = NormStructure(f"{prefix}router.scale", float(router.eps), False, factor=float(router.scalar_root_size))
    count, hidden, inner = experts.down_proj.shape
    if hidden % STEP or inner % STEP:
        raise OtherStructure(f"experts of sizes that {STEP} does not divide")
    return ExpertsStructure(
        router=linear_structure(router, f"{prefix}router.", ("proj",)),
        gate_up=f"{prefix}experts.gate_up_proj",
        down=f"{prefix}experts.down_proj",
        count=count,
        inner=inner,
        top_k=int(router.config.top_k_experts),
        normalised=True,
        scales=f"{prefix}router.per_expert_scale",
        shared=shared,
        shared_gate=False,
        activation=activation_of(experts.act_fn),
        norms=(scale, *norms),
    )


def _gated_mlp(mlp: Any, prefix: str, stored: StoredWeights | None = None) -> MlpStructure:
    """stored: the weights of a file, which may hold gate and up by themselves where the stock model has one matrix."""
    named = next((found for name in _ACTIVATIONS if (found := getattr(mlp, name, None)) is not None), None)
    for up, down in _PLAIN:
        if hasattr(mlp, up) and not hasattr(mlp, "gate_proj"):
            only(mlp, {up, down, *_ACTIVATIONS})
            ends = linear_structure(mlp, prefix, (up,)), linear_structure(mlp, prefix, (down,))
            if all(hasattr(named, name) for name in _XIELU):
                amounts = tuple(f"{prefix}{named_part(mlp, _ACTIVATIONS)}.{name}" for name in _XIELU)
                return MlpStructure(*ends, Activation.XIELU, plain=True, amounts=amounts)
            return MlpStructure(*ends, activation_of(named), plain=True)
    gate, up, down, both = next((names for names in _PROJECTIONS if hasattr(mlp, names[2])), _PROJECTIONS[0])
    only(mlp, {gate, up, down, both, *_ACTIVATIONS, _SUB_NORM})
    in_code = gate == "w1" and named is None  # which is proved
    activation = Activation.SILU if in_code else activation_of(named)
    apart = tuple(held_as(prefix, stored, f"{name}.weight") for name in (gate, up))
    if apart[0].startswith(OWN):
        gate_up = LinearStructure(apart, ("", ""), (None, None))
    else:
        gate_up = linear_structure(mlp, prefix, (gate, up), both)
    scale = float(getattr(mlp, "gate_multiplier", 1.0))
    norm = rms_structure(getattr(mlp, _SUB_NORM), f"{prefix}{_SUB_NORM}.") if hasattr(mlp, _SUB_NORM) else None
    down_part = linear_structure(mlp, prefix, (down,))
    return MlpStructure(gate_up, down_part, activation, gate_scale=scale, sub_norm=norm)


def _experts(mlp: Any, prefix: str) -> ExpertsStructure:
    shared, shared_gate = next((names for names in _SHARED if getattr(mlp, names[0], None) is not None), ("", ""))
    named = named_part(mlp, ("gate", "router"))
    nothing = {name for name, part in mlp.named_children() if isinstance(part, nn.Identity)}
    only(mlp, {named, "experts", shared, shared_gate} | nothing)
    router, experts = getattr(mlp, named), mlp.experts
    parts = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]}
    correction = {name for name in parts if name.endswith(CORRECTION)}
    [weight, *others] = sorted(parts - correction, key=lambda name: not name.endswith("weight"))
    shapes = {name: weight.shape for name, weight in experts.named_parameters()}
    biases = _EXPERT_BIASES if shapes.keys() >= {*_EXPERT_BIASES} else ("", "")
    plain = "up_proj" in shapes
    gate_up = "up_proj" if plain else "gate_up_proj"
    if others not in ([], ["bias"]) or shapes.keys() != {gate_up, "down_proj", *biases} - {""}:
        raise OtherStructure("experts or a router with parts of their own")
    count, hidden = router.get_parameter(weight).shape
    in_turn = hasattr(experts, "alpha")  # as only one family has them: proved
    inner = shapes["down_proj"][1 if in_turn else 2]
    expected = (count, hidden, 2 * inner) if in_turn else (count, (1 if plain else 2) * inner, hidden)
    if shapes[gate_up] != expected or hidden % 32 or inner % 32:
        raise OtherStructure("experts of sizes that 32 does not divide")
    activation = Activation.CLAMPED if in_turn else activation_of(experts.act_fn)
    routing = routing_of(router)
    routers = [f"{prefix}{named}.{weight}", *([f"{prefix}{shared_gate}.weight"] if shared_gate else [])]
    of_router = (f"{prefix}{named}.bias" if others else "", *([""] if shared_gate else []))
    bias = f"{prefix}expert_bias" if hasattr(mlp, "expert_bias") else ""
    bias = next((f"{prefix}{named}.{name}" for name in correction), bias)
    gate_up_bias, down_bias = (f"{prefix}experts.{name}" if name else "" for name in biases)
    return ExpertsStructure(
        router=LinearStructure(tuple(routers), of_router, (None,) * len(routers)),
        gate_up=f"{prefix}experts.{gate_up}",
        down=f"{prefix}experts.down_proj",
        count=count,
        inner=inner,
        top_k=int(router.top_k),
        bias=bias,
        scale=scale_of(router),
        **routing._asdict(),
        shared=_gated_mlp(getattr(mlp, shared), f"{prefix}{shared}.") if shared else None,
        shared_gate=bool(shared_gate),
        activation=activation,
        alpha=float(getattr(experts, "alpha", 1.0)),
        limit=float(getattr(experts, "limit", 0.0)),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        in_turn=in_turn,
        plain=plain,
    )
