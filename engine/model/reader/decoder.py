"""Reads the structure of a whole decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.model.reader.mixers import attention_structure, gated_delta_structure, short_convolution_structure
from engine.model.reader.parts import is_gelu, linear_structure, norm_structure, only
from engine.model.rotary import frequencies_of
from engine.model.structure import (
    AttentionStructure,
    DecoderStructure,
    ExpertsStructure,
    GatedDeltaStructure,
    LayerStructure,
    LinearStructure,
    MlpStructure,
    OtherStructure,
    ShortConvolutionStructure,
)
from engine.weights.stored_weights import StoredWeights

_NORMS = (  # names of a layer's norms: before the mixer, of its result, before the MLP, of its result
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("operator_norm", "", "ffn_norm", ""),
)
_MIXERS = ("self_attn", "linear_attn", "conv")
_MLPS = ("mlp", "feed_forward")
_LAST_NORMS = ("norm", "embedding_norm")
_ROTARIES = ("rotary_emb", "pos_emb")
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down
_MLP = {"gate_up_proj", "act_fn", "activation_fn"}


def describe(model: Any, stored: StoredWeights | None = None) -> DecoderStructure:
    """Return the structure of a stock model, in memory or on the meta device. stored: the weights of the latter. Raises
    OtherStructure, or AttributeError where a part is missing.
    """
    base, config = getattr(model, "model", None), model.config.get_text_config()
    if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise OtherStructure("no model with lm_head")
    last_norm, rotary = _named(base, _LAST_NORMS), _named(base, _ROTARIES)
    only(model, {"model", "lm_head"})
    only(base, {"embed_tokens", "layers", last_norm, rotary})
    heads, kv_heads, head_dim = head_sizes(config)
    layer_types = getattr(config, "layer_types", None)
    frequencies = frequencies_of(getattr(base, rotary))
    if frequencies is None:
        raise OtherStructure(f"{type(getattr(base, rotary)).__name__} rotates by angles of its own")
    kinds, width = [*frequencies], 2 * len(next(iter(frequencies.values())).of_position)
    tables = [kinds.index(layer_types[i]) if len(kinds) > 1 and layer_types else 0 for i in range(len(base.layers))]
    vocab_size, hidden = base.embed_tokens.weight.shape

    def mixer(
        layer: Any, prefix: str, table: int
    ) -> AttentionStructure | GatedDeltaStructure | ShortConvolutionStructure:
        name = _named(layer, _MIXERS)
        part, at = getattr(layer, name), f"{prefix}{name}."
        if name == "linear_attn":
            return gated_delta_structure(part, at, stored)
        if name == "conv":
            return short_convolution_structure(part, at)
        return attention_structure(part, at, heads, head_dim, width, table)

    return DecoderStructure(
        vocab_size=vocab_size,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=tuple(frequencies.values()),
        layers=tuple(
            _layer(layer, f"model.layers.{index}.", mixer(layer, f"model.layers.{index}.", tables[index]))
            for index, layer in enumerate(base.layers)
        ),
        norm=norm_structure(getattr(base, last_norm), f"model.{last_norm}."),
        head=linear_structure(model, "", ("lm_head",)),
        embedding="model.embed_tokens.weight",
        tied=base.embed_tokens.weight is model.lm_head.weight,
        embedding_scale=_embedding_scale(base),
        logit_divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads, and the dimensions of one."""
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads, head_dim


def _named(module: Any, names: tuple[str, ...]) -> str:
    """Return the first of these names that a part of the module has; the first of all if none has one."""
    return next((name for name in names if hasattr(module, name)), names[0])


def _layer(
    layer: Any, prefix: str, mixer: AttentionStructure | GatedDeltaStructure | ShortConvolutionStructure
) -> LayerStructure:
    rest = {name for name, _ in layer.named_children()} - {"resid_attn_dropout", "resid_mlp_dropout"}
    mlp, parts = _named(layer, _MLPS), rest - {*_MIXERS, *_MLPS}
    names = next((names for names in _NORMS if parts == {*names} - {""}), None)
    if names is None:
        raise OtherStructure(f"a layer of {', '.join(sorted(rest))}")
    norms = [norm_structure(getattr(layer, name), f"{prefix}{name}.") if name else None for name in names]
    if len({norm.epsilon for norm in norms if norm is not None}) > 1:
        raise OtherStructure("norms of a layer with different epsilons")
    return LayerStructure(
        mixer=mixer,
        mlp=_mlp(getattr(layer, mlp), f"{prefix}{mlp}."),
        input_norm=norms[0],
        out_norm=norms[1],
        inner_norm=norms[2],
        down_norm=norms[3],
        residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _mlp(mlp: Any, prefix: str) -> MlpStructure | ExpertsStructure:
    return _experts(mlp, prefix) if hasattr(mlp, "experts") else _gated_mlp(mlp, prefix)


def _gated_mlp(mlp: Any, prefix: str) -> MlpStructure:
    gate, up, down = next((names for names in _PROJECTIONS if hasattr(mlp, names[2])), _PROJECTIONS[0])
    only(mlp, _MLP | {gate, up, down})
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    gelu = False if gate == "w1" and activation is None else is_gelu(activation)  # which is in the code, and proved
    gate_up = linear_structure(mlp, prefix, (gate, up), "gate_up_proj")
    return MlpStructure(gate_up, linear_structure(mlp, prefix, (down,)), gelu)


def _experts(mlp: Any, prefix: str) -> ExpertsStructure:
    shared = hasattr(mlp, "shared_expert")
    only(mlp, {"gate", "experts", *(("shared_expert", "shared_expert_gate") if shared else ())})
    router, experts = mlp.gate, mlp.experts
    parts = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]}
    shapes = {name: weight.shape for name, weight in experts.named_parameters()}
    if parts != {"weight"} or shapes.keys() != {"gate_up_proj", "down_proj"}:
        raise OtherStructure("experts or a router with parts of their own")
    (count, hidden), (_, _, inner) = router.weight.shape, shapes["down_proj"]
    whole = shapes["gate_up_proj"] == (count, 2 * inner, hidden) and hidden % 32 == inner % 32 == 0
    if not whole or is_gelu(experts.act_fn):
        raise OtherStructure("experts that are not gated by SiLU, or of sizes that 32 does not divide")
    routers = [f"{prefix}gate.weight", *([f"{prefix}shared_expert_gate.weight"] if shared else [])]
    return ExpertsStructure(
        router=LinearStructure(tuple(routers), ("",) * len(routers), (None,) * len(routers)),
        gate_up=f"{prefix}experts.gate_up_proj",
        down=f"{prefix}experts.down_proj",
        count=count,
        inner=inner,
        top_k=int(router.top_k),
        normalised=bool(getattr(router, "norm_topk_prob", True)),
        sigmoid=hasattr(router, "routed_scaling_factor"),
        bias=f"{prefix}expert_bias" if getattr(mlp, "use_expert_bias", False) else "",
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
        shared=_gated_mlp(mlp.shared_expert, f"{prefix}shared_expert.") if shared else None,
    )


def _embedding_scale(base: Any) -> float:
    """Return the factor of the tokens' embeddings."""
    embed = base.embed_tokens
    scale: Tensor = torch.tensor(float(getattr(embed, "scalar_embed_scale", 1.0))).to(embed.weight.dtype)
    if type(embed) is not nn.Embedding and not hasattr(embed, "scalar_embed_scale"):
        raise OtherStructure(f"the embedding {type(embed).__name__}")
    return float(scale) * float(getattr(base, "embedding_multiplier", 1.0))
