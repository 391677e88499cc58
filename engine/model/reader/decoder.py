"""Reads the structure of a whole decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from engine.core.errors import ModelError, first_line
from engine.model.reader.latent import LATENT, latent_attention_structure
from engine.model.reader.mixers import (
    attention_structure,
    channel_delta_structure,
    gated_delta_structure,
    mamba_structure,
    short_convolution_structure,
)
from engine.model.reader.mlp import ALONE, EXPERTS_BESIDE, MLPS, mlp_of
from engine.model.reader.parts import (
    activation_of,
    linear_structure,
    named_part,
    norm_structure,
    only,
    rms_structure,
    text_part,
)
from engine.model.rotary import frequencies_of
from engine.model.structure import (
    AttentionStructure,
    DecoderStructure,
    LayerInputStructure,
    LayerStructure,
    Mixer,
    NormStructure,
    OtherStructure,
    PerLayerInputsStructure,
)
from engine.weights.stored_weights import StoredWeights

_NORMS = (  # names of a layer's norms: before the mixer, of its result, before the MLP, of its result
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("attention_layernorm", "", "feedforward_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    ("operator_norm", "", "ffn_norm", ""),
    ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
    ("input_layernorm", "", "pre_ff_layernorm", ""),
    ("input_layernorm", "", "", ""),  # whose MLP gets the same as attention
    ("norm", "", "", ""),  # of a mixer or an MLP alone
)
_MIXERS = ("self_attn", "attention", "linear_attn", "conv", "mamba", ALONE)
_EMBEDDINGS = ("embed_tokens", "embeddings", "embed_in")
_LAST_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f", "final_layer_norm")
_ROTARIES = ("rotary_emb", "pos_emb")
_DROPOUTS = {"resid_attn_dropout", "resid_mlp_dropout", "resid_dropout", "dropout", "embed_dropout"}
_DROPOUTS |= {"emb_dropout", "post_attention_dropout", "post_mlp_dropout"}
_LAYER_INPUTS = ("per_layer_model_projection", "per_layer_projection_norm", "embed_tokens_per_layer")
_LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "act_fn")


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
    last_norm, rotary, embed = (named_part(base, names) for names in (_LAST_NORMS, _ROTARIES, _EMBEDDINGS))
    embedding = getattr(base, embed)
    only(model, {prefix.partition(".")[0], "lm_head"})
    beside = _LAYER_INPUTS if hasattr(base, _LAYER_INPUTS[0]) else ()
    only(base, {embed, "layers", last_norm, rotary, *beside} | _DROPOUTS)
    layer_types = getattr(config, "layer_types", None) or [""] * len(base.layers)
    frequencies = frequencies_of(getattr(base, rotary, None))
    if frequencies is None:
        raise OtherStructure(f"{type(getattr(base, rotary)).__name__} rotates by angles of its own")
    kinds, widths = [*frequencies], [one.dims for one in frequencies.values()]
    tables = [kinds.index(layer_types[i]) if layer_types[i] in kinds else 0 for i in range(len(base.layers))]
    vocab_size, hidden = embedding.weight.shape

    attending = dict[int, Any]()

    def mixer(layer: Any, index: int) -> Mixer | None:
        name, table = named_part(layer, _MIXERS), tables[index]
        part, at = getattr(layer, name), f"{prefix}layers.{index}.{name}."
        if name == "linear_attn":
            return gated_delta_structure(part, at, stored)
        if hasattr(part, "forget_gate"):
            return channel_delta_structure(part, at, stored)
        if name == "conv":
            return short_convolution_structure(part, at)
        if hasattr(part, "ssm_state_size"):
            return mamba_structure(part, at, config, stored)
        if name == ALONE and not hasattr(part, "o_proj"):
            return None
        if hasattr(part, LATENT):
            return latent_attention_structure(part, at, config, widths[table], table, stored)
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
        embedding_scale=_embedding_scale(embedding) * _multiplier(base, config, hidden),
        logit_divisor=_logit_divisor(base, config),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        layer_inputs=_layer_inputs(base, prefix, vocab_size),
    )


def _scaled(found: AttentionStructure, layer: Any, attention: Any) -> AttentionStructure:
    """Attention whose input and keys are multiplied, which the scale of its scores takes up."""
    of_input = float(getattr(layer, "attention_in_multiplier", 1.0))
    if of_input != 1 and any(found.qkv.biases):
        raise OtherStructure(f"{type(attention).__name__} with biases and an input that is multiplied")
    scale = of_input**2 * float(getattr(attention, "key_multiplier", 1.0))
    return msgspec.structs.replace(found, score_scale=scale)


def _logit_divisor(base: Any, config: Any) -> float:
    """Return what logits are divided by, as families say it."""
    factor = getattr(config, "logit_scale", None) or getattr(base, "lm_head_multiplier", None) or 1
    return float(getattr(config, "logits_scaling", None) or 1 / factor)


def _scales(layer: Any, mlp: Any) -> tuple[float, float, float]:
    """Return what multiplies what the mixer, what is beside it, and the MLP add to the residual."""
    of_all = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
    of_mixer = getattr(layer, "attn_out_multiplier", 1.0) * getattr(layer, "attention_in_multiplier", 1.0)
    return (
        of_all * float(of_mixer),
        of_all * float(getattr(layer, "ssm_out_multiplier", 1.0)),
        of_all * float(getattr(mlp, "down_multiplier", 1.0)),
    )


def _layer(layer: Any, prefix: str, mixer: Mixer | None, config: Any, stored: StoredWeights | None) -> LayerStructure:
    both = isinstance(mixer, AttentionStructure) and getattr(layer, "mamba", None) is not None
    beside = mamba_structure(layer.mamba, f"{prefix}mamba.", config, stored) if both else None
    gets_input, alone = hasattr(layer, _LAYER_INPUT[0]), hasattr(layer, ALONE)
    rest = {name for name, part in layer.named_children() if not isinstance(part, nn.Identity)} - _DROPOUTS
    rest -= {*(_LAYER_INPUT if gets_input else ())}
    rest -= EXPERTS_BESIDE if hasattr(layer, "experts") else set()
    parts = rest - {*_MIXERS, *MLPS}
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
        mlp=None if alone and mixer is not None else mlp_of(layer, prefix, stored),
        input_norm=norms[0],
        out_norm=norms[1],
        inner_norm=norms[2],
        down_norm=norms[3],
        scales=_scales(layer, getattr(layer, named_part(layer, MLPS))),
        layer_input=_layer_input(layer, prefix) if gets_input else None,
        scale=f"{prefix}layer_scalar" if hasattr(layer, "layer_scalar") else "",
        parallel=(names[1:] == ("", "", "") and not alone) or bool(getattr(layer, "use_parallel_residual", False)),
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
    """Return what the layers get of the tokens beside the residual. The projection's factor is undone by the norm after
    it, but for the norm's epsilon. Raises ModelError if they get nothing of some tokens: a kernel would read beyond.
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


def _multiplier(base: Any, config: Any, hidden: int) -> float:
    """Return what embeddings are multiplied by, as families say it."""
    return hidden**0.5 if getattr(config, "mup_enabled", False) else float(getattr(base, "embedding_multiplier", 1.0))


def _embedding_scale(embed: Any) -> float:
    """Return the factor of an embedding."""
    named = getattr(embed, "scalar_embed_scale", getattr(embed, "embed_scale", 1.0))
    scale: Tensor = torch.as_tensor(named).to(embed.weight.dtype)
    if type(embed) is not nn.Embedding and not hasattr(embed, "scalar_embed_scale"):
        raise OtherStructure(f"the embedding {type(embed).__name__}")
    return float(scale)
