"""Reads the structure of a whole decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from engine.core.errors import ModelError, first_line
from engine.kernels.fused import Activation
from engine.model.reader.mixers import (
    attention_structure,
    gated_delta_structure,
    held_as,
    mamba_structure,
    short_convolution_structure,
)
from engine.model.reader.parts import activation_of, linear_structure, norm_structure, only, rms_structure, text_part
from engine.model.rotary import frequencies_of
from engine.model.structure import (
    AttentionStructure,
    DecoderStructure,
    ExpertsStructure,
    LayerInputStructure,
    LayerStructure,
    LinearStructure,
    Mixer,
    MlpStructure,
    NormStructure,
    OtherStructure,
    PerLayerInputsStructure,
)
from engine.weights.stored_weights import OWN, StoredWeights

_NORMS = (  # names of a layer's norms: before the mixer, of its result, before the MLP, of its result
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("operator_norm", "", "ffn_norm", ""),
    ("input_layernorm", "", "pre_ff_layernorm", ""),
    ("input_layernorm", "", "", ""),  # whose MLP gets the same as attention
    ("norm", "", "", ""),  # of a mixer or an MLP alone
)
_ALONE = "mixer"  # of layers that have a mixer or an MLP alone, which of the two
_MIXERS = ("self_attn", "linear_attn", "conv", "mamba", _ALONE)
_MLPS = ("block_sparse_moe", "mlp", "feed_forward", "shared_mlp", _ALONE)
_EMBEDDINGS = ("embed_tokens", "embeddings")
_SHARED_MLP = "shared_mlp"  # beside experts, every row's
_LAST_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")
_ROTARIES = ("rotary_emb", "pos_emb")
_PROJECTIONS = (  # gate, up, down, and what the first two are called if they are one
    ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    ("w1", "w3", "w2", ""),
    ("gate", "up", "output_linear", "input_linear"),
)
_PLAIN = (("up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"))  # up, down, of MLPs without a gate
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
_DROPOUTS = {"resid_attn_dropout", "resid_mlp_dropout", "resid_dropout", "dropout", "embed_dropout"}
_SHARED = (("shared_expert", "shared_expert_gate"), ("shared_experts", ""))  # and their gates
_LAYER_INPUTS = ("per_layer_model_projection", "per_layer_projection_norm", "embed_tokens_per_layer")
_LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "act_fn")
_CORRECTION = "e_score_correction_bias"
_EXPERT_BIASES = ("gate_up_proj_bias", "down_proj_bias")


def describe(model: Any, stored: StoredWeights | None = None) -> DecoderStructure:
    """Return the structure of a stock model, in memory or on the meta device. stored: the weights of the latter. Raises
    OtherStructure, or AttributeError where a part is missing.
    """
    try:
        return _described(model, stored)
    except (OtherStructure, AttributeError):
        raise
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:  # families differ in any way
        raise OtherStructure(first_line(error)) from error


def _described(model: Any, stored: StoredWeights | None) -> DecoderStructure:
    """Read the structure. Raises whatever a family that is built in another way leads to."""
    (base, prefix), config = text_part(model), model.config.get_text_config()
    if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise OtherStructure("no model with lm_head")
    last_norm, rotary, embed = (_named(base, names) for names in (_LAST_NORMS, _ROTARIES, _EMBEDDINGS))
    embedding = getattr(base, embed)
    only(model, {"model", "lm_head"})
    beside = _LAYER_INPUTS if hasattr(base, _LAYER_INPUTS[0]) else ()
    only(base, {embed, "layers", last_norm, rotary, *beside} | _DROPOUTS)
    layer_types = getattr(config, "layer_types", None)
    frequencies = frequencies_of(getattr(base, rotary, None))
    if frequencies is None:
        raise OtherStructure(f"{type(getattr(base, rotary)).__name__} rotates by angles of its own")
    kinds, widths = [*frequencies], [one.dims for one in frequencies.values()]
    tables = [kinds.index(layer_types[i]) if len(kinds) > 1 and layer_types else 0 for i in range(len(base.layers))]
    vocab_size, hidden = embedding.weight.shape

    attending = dict[int, Any]()

    def mixer(layer: Any, index: int) -> Mixer | None:
        name, table = _named(layer, _MIXERS), tables[index]
        part, at = getattr(layer, name), f"{prefix}layers.{index}.{name}."
        if name == "linear_attn":
            return gated_delta_structure(part, at, stored)
        if name == "conv":
            return short_convolution_structure(part, at)
        if hasattr(part, "ssm_state_size"):
            return mamba_structure(part, at, config, stored)
        if name == _ALONE and not hasattr(part, "o_proj"):
            return None
        earlier = dict(attending)
        attending[index] = part
        found = attention_structure(part, at, config, widths[table], table, earlier)
        return _scaled(found, layer, part)

    return DecoderStructure(
        vocab_size=vocab_size,
        hidden=hidden,
        rotary=tuple(frequencies.values()),
        layers=tuple(
            _layer(layer, f"{prefix}layers.{index}.", mixer(layer, index), config, stored)
            for index, layer in enumerate(base.layers)
        ),
        norm=norm_structure(getattr(base, last_norm), f"{prefix}{last_norm}."),
        head=linear_structure(model, "", ("lm_head",)),
        embedding=f"{prefix}{embed}.weight",
        tied=embedding.weight is model.lm_head.weight,
        embedding_scale=_embedding_scale(embedding) * float(getattr(base, "embedding_multiplier", 1.0)),
        logit_divisor=_logit_divisor(base, config),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        layer_inputs=_layer_inputs(base, prefix, vocab_size),
    )


def _named(module: Any, names: tuple[str, ...]) -> str:
    """Return the first of these names that a part of the module has; the first of all if none has one."""
    return next((name for name in names if getattr(module, name, None) is not None), names[0])


def _scaled(found: AttentionStructure, layer: Any, attention: Any) -> AttentionStructure:
    """Attention whose input and keys are multiplied, which the scale of its scores takes up."""
    of_input = float(getattr(layer, "attention_in_multiplier", 1.0))
    if of_input != 1 and any(found.qkv.biases):
        raise OtherStructure(f"{type(attention).__name__} with biases and an input that is multiplied")
    scale = of_input**2 * float(getattr(attention, "key_multiplier", 1.0))
    return msgspec.structs.replace(found, score_scale=scale)


def _logit_divisor(base: Any, config: Any) -> float:
    """What logits are divided by, as families say it."""
    factor = getattr(config, "logit_scale", None) or getattr(base, "lm_head_multiplier", None) or 1
    return float(getattr(config, "logits_scaling", None) or 1 / factor)


def _scales(layer: Any, mlp: Any) -> tuple[float, float, float]:
    """What multiplies what the mixer, what is beside it, and the MLP add to the residual."""
    of_all = float(getattr(layer, "residual_multiplier", 1.0))
    of_mixer = getattr(layer, "attn_out_multiplier", 1.0) * getattr(layer, "attention_in_multiplier", 1.0)
    return (
        of_all * float(of_mixer),
        of_all * float(getattr(layer, "ssm_out_multiplier", 1.0)),
        of_all * float(getattr(mlp, "down_multiplier", 1.0)),
    )


def _layer(layer: Any, prefix: str, mixer: Mixer | None, config: Any, stored: StoredWeights | None) -> LayerStructure:
    both = isinstance(mixer, AttentionStructure) and getattr(layer, "mamba", None) is not None
    beside = mamba_structure(layer.mamba, f"{prefix}mamba.", config, stored) if both else None
    gets_input, alone = hasattr(layer, _LAYER_INPUT[0]), hasattr(layer, _ALONE)
    rest = {name for name, _ in layer.named_children()} - _DROPOUTS
    rest -= {*(_LAYER_INPUT if gets_input else ())}
    parts = rest - {*_MIXERS, *_MLPS}
    names = next((names for names in _NORMS if parts == {*names} - {""}), None)
    if names is None:
        raise OtherStructure(f"a layer of {', '.join(sorted(rest))}")
    kinds = norm_structure, rms_structure, norm_structure, rms_structure
    norms = [
        kind(getattr(layer, name), f"{prefix}{name}.") if name else None
        for kind, name in zip(kinds, names, strict=True)
    ]
    if len({norm.epsilon for norm in norms if norm is not None}) > 1:
        raise OtherStructure("norms of a layer with different epsilons")
    return LayerStructure(
        mixer=mixer,
        mlp=None if alone and mixer is not None else _mlp(layer, prefix, stored),
        input_norm=norms[0],
        out_norm=norms[1],
        inner_norm=norms[2],
        down_norm=norms[3],
        scales=_scales(layer, getattr(layer, _named(layer, _MLPS))),
        layer_input=_layer_input(layer, prefix) if gets_input else None,
        scale=f"{prefix}layer_scalar" if hasattr(layer, "layer_scalar") else "",
        parallel=names[1:] == ("", "", "") and not alone,
        beside=beside,
    )


def _layer_input(layer: Any, prefix: str) -> LayerInputStructure:
    gate, out, norm, activation = _LAYER_INPUT
    return LayerInputStructure(
        gate=linear_structure(layer, prefix, (gate,)),
        out=linear_structure(layer, prefix, (out,)),
        norm=rms_structure(getattr(layer, norm), f"{prefix}{norm}."),
        activation=activation_of(getattr(layer, activation)),
    )


def _layer_inputs(base: Any, prefix: str, tokens: int) -> PerLayerInputsStructure | None:
    """What the layers get of the tokens beside the residual. The projection's factor is undone by the norm after it,
    but for the norm's epsilon. Raises ModelError if they get nothing of some tokens: a kernel would read beyond.
    """
    project, norm, embedding = _LAYER_INPUTS
    if not hasattr(base, project):
        return None
    if (rows := len(getattr(base, embedding).weight)) < tokens:
        raise ModelError(
            f"model: vocab_size_per_layer_input={rows} is less than vocab_size={tokens}, and layers get an input of "
            "every token; get the whole checkpoint, or correct its config.json"
        )
    found, factor = (
        rms_structure(getattr(base, norm), f"{prefix}{norm}."),
        float(base.per_layer_model_projection_scale),
    )
    return PerLayerInputsStructure(
        project=linear_structure(base, prefix, (project,)),
        norm=NormStructure(found.weight, found.epsilon / factor**2, found.adds_one),
        embedding=f"{prefix}{embedding}.weight",
        embedding_scale=_embedding_scale(getattr(base, embedding)),
        scale=float(base.per_layer_input_scale),
    )


def _mlp(layer: Any, prefix: str, stored: StoredWeights | None) -> MlpStructure | ExpertsStructure:
    name = _named(layer, _MLPS)
    mlp, beside = getattr(layer, name), getattr(layer, _SHARED_MLP, None)
    if not hasattr(mlp, "experts"):
        return _gated_mlp(mlp, f"{prefix}{name}.", stored)
    found = _experts(mlp, f"{prefix}{name}.")
    if beside is None:
        return found
    shared = _gated_mlp(beside, f"{prefix}{_SHARED_MLP}.", stored)
    return msgspec.structs.replace(found, shared=shared, shared_gate=False)


def _gated_mlp(mlp: Any, prefix: str, stored: StoredWeights | None = None) -> MlpStructure:
    """stored: the weights of a file, which may hold gate and up by themselves where the stock model has one matrix."""
    named = next((found for name in _ACTIVATIONS if (found := getattr(mlp, name, None)) is not None), None)
    for up, down in _PLAIN:
        if hasattr(mlp, up) and not hasattr(mlp, "gate_proj"):
            only(mlp, {up, down, *_ACTIVATIONS})
            ends = linear_structure(mlp, prefix, (up,)), linear_structure(mlp, prefix, (down,))
            return MlpStructure(*ends, activation_of(named), plain=True)
    gate, up, down, both = next((names for names in _PROJECTIONS if hasattr(mlp, names[2])), _PROJECTIONS[0])
    only(mlp, {gate, up, down, both, *_ACTIVATIONS})
    in_code = gate == "w1" and named is None  # which is proved
    activation = Activation.SILU if in_code else activation_of(named)
    apart = tuple(held_as(prefix, stored, f"{name}.weight") for name in (gate, up))
    if apart[0].startswith(OWN):
        gate_up = LinearStructure(apart, ("", ""), (None, None))
    else:
        gate_up = linear_structure(mlp, prefix, (gate, up), both)
    scale = float(getattr(mlp, "gate_multiplier", 1.0))
    return MlpStructure(gate_up, linear_structure(mlp, prefix, (down,)), activation, gate_scale=scale)


def _experts(mlp: Any, prefix: str) -> ExpertsStructure:
    shared, shared_gate = next((names for names in _SHARED if hasattr(mlp, names[0])), ("", ""))
    named = _named(mlp, ("gate", "router"))
    nothing = {name for name, part in mlp.named_children() if isinstance(part, nn.Identity)}
    only(mlp, {named, "experts", shared, shared_gate} | nothing)
    router, experts = getattr(mlp, named), mlp.experts
    parts = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]} - {_CORRECTION}
    shapes = {name: weight.shape for name, weight in experts.named_parameters()}
    biases = _EXPERT_BIASES if shapes.keys() >= {*_EXPERT_BIASES} else ("", "")
    plain = "up_proj" in shapes
    gate_up = "up_proj" if plain else "gate_up_proj"
    if parts - {"bias"} != {"weight"} or shapes.keys() != {gate_up, "down_proj", *biases} - {""}:
        raise OtherStructure("experts or a router with parts of their own")
    (count, hidden), in_turn = router.weight.shape, hasattr(experts, "alpha")  # as only one family has them: proved
    inner = shapes["down_proj"][1 if in_turn else 2]
    expected = (count, hidden, 2 * inner) if in_turn else (count, (1 if plain else 2) * inner, hidden)
    if shapes[gate_up] != expected or hidden % 32 or inner % 32:
        raise OtherStructure("experts of sizes that 32 does not divide")
    activation = Activation.CLAMPED if in_turn else activation_of(experts.act_fn)
    if getattr(router, "num_group", 1) != 1:
        raise OtherStructure("a router that chooses groups of experts first")
    routers = [f"{prefix}{named}.weight", *([f"{prefix}{shared_gate}.weight"] if shared_gate else [])]
    of_router = (f"{prefix}{named}.bias" if "bias" in parts else "", *([""] if shared_gate else []))
    bias = f"{prefix}expert_bias" if getattr(mlp, "use_expert_bias", False) else ""
    bias = f"{prefix}{named}.{_CORRECTION}" if hasattr(router, _CORRECTION) else bias
    gate_up_bias, down_bias = (f"{prefix}experts.{name}" if name else "" for name in biases)
    return ExpertsStructure(
        router=LinearStructure(tuple(routers), of_router, (None,) * len(routers)),
        gate_up=f"{prefix}experts.{gate_up}",
        down=f"{prefix}experts.down_proj",
        count=count,
        inner=inner,
        top_k=int(router.top_k),
        normalised=bool(getattr(router, "norm_topk_prob", True)),
        sigmoid=hasattr(router, "routed_scaling_factor"),
        bias=bias,
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
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


def _embedding_scale(embed: Any) -> float:
    """Return the factor of an embedding."""
    named = getattr(embed, "scalar_embed_scale", getattr(embed, "embed_scale", 1.0))
    scale: Tensor = torch.as_tensor(named).to(embed.weight.dtype)
    if type(embed) is not nn.Embedding and not hasattr(embed, "scalar_embed_scale"):
        raise OtherStructure(f"the embedding {type(embed).__name__}")
    return float(scale)
