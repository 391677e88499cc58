"""What a lean decoder is made of, as plain data: names of parameters, kinds, sizes and factors.

It is read from the modules of a stock model, and what a module computes by trying it: never from a family's name. A
decoder is built from this and from the parameters alone (`engine.model.decoder`), so that a model whose proof is
remembered starts without the stock model's code.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.simd import LANES
from engine.model.rotary import Frequencies, frequencies_of

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


class LinearStructure(msgspec.Struct, frozen=True):
    """Matrices over the same input, whose outputs follow one another. weights: names of parameters. biases: as many;
    "" where there is none. orders: as many, of the outputs within each run of so many; () as they are.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]


class NormStructure(msgspec.Struct, frozen=True):
    """An RMSNorm. adds_one: it multiplies by 1 + weight."""

    weight: str
    epsilon: float
    adds_one: bool


class MlpStructure(msgspec.Struct, frozen=True, tag=True):
    """See `GatedMlp`."""

    gate_up: LinearStructure
    down: LinearStructure
    gelu: bool


class ExpertsStructure(msgspec.Struct, frozen=True, tag=True):
    """See `ExpertMlp`. gate_up, down: the parameters that hold the matrices of all experts, `count` of them."""

    router: str
    gate_up: str
    down: str
    count: int
    inner: int
    top_k: int
    normalised: bool


class AttentionStructure(msgspec.Struct, frozen=True, tag=True):
    """See `AttentionWeights`. gated: the outputs of `qkv` are queries, keys, values, and a gate for each query, whose
    sigmoid multiplies what attention gives.
    """

    qkv: LinearStructure
    out: LinearStructure
    query_norm: NormStructure | None
    key_norm: NormStructure | None
    rotated: int
    rotary_table: int
    gated: bool = False


class GatedDeltaStructure(msgspec.Struct, frozen=True, tag=True):
    """A gated delta net: see `engine.kernels.state.delta`.

    inputs: its outputs are q and k of each key head, then v and z of each value head. gates: b, then a, one for each
    value head. convolution: [channels of q, k and v, width]. decay, dt_bias: one for each value head. decay_is_log: a
    step keeps exp(-exp(decay) * softplus(a + dt_bias)) of the state; otherwise `decay` stands for -exp(decay). norm: of
    each value head, multiplied by SiLU(z). key_head_of: for each value head, the key head that serves it.
    """

    inputs: LinearStructure
    gates: LinearStructure
    convolution: str
    decay: str
    decay_is_log: bool
    dt_bias: str
    norm: NormStructure
    out: LinearStructure
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    key_head_of: tuple[int, ...]


class ShortConvolutionStructure(msgspec.Struct, frozen=True, tag=True):
    """A gated short convolution: see `engine.kernels.state.short_convolution`.

    inputs: its outputs are B, C and x, as wide as the model each. convolution: [hidden, width]. bias: of the
    convolution, "" if there is none. The layer gives out(C * convolution(B * x)).
    """

    inputs: LinearStructure
    convolution: str
    bias: str
    out: LinearStructure
    width: int


class LayerStructure(msgspec.Struct, frozen=True):
    """See `LayerWeights`. mixer: what makes a row of itself and the rows before it."""

    mixer: AttentionStructure | GatedDeltaStructure | ShortConvolutionStructure
    mlp: MlpStructure | ExpertsStructure
    input_norm: NormStructure | None
    out_norm: NormStructure | None
    inner_norm: NormStructure | None
    down_norm: NormStructure | None
    residual_scale: float


class DecoderStructure(msgspec.Struct, frozen=True):
    """rotary: of each table. tied: the embedding is the output matrix. logit_divisor, logit_cap: what logits are
    divided by, and capped at by tanh; a cap of 0 is none.
    """

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: tuple[Frequencies, ...]
    layers: tuple[LayerStructure, ...]
    norm: NormStructure
    head: LinearStructure
    embedding: str
    tied: bool
    embedding_scale: float
    logit_divisor: float
    logit_cap: float

    @property
    def key_layers(self) -> int:
        """How many layers have keys and values; the others have a state."""
        return sum(isinstance(layer.mixer, AttentionStructure) for layer in self.layers)


def describe(model: Any) -> DecoderStructure:
    """The structure of a stock model, in memory or on the meta device. Raises OtherStructure, or AttributeError where a
    part is missing.
    """
    base, config = getattr(model, "model", None), model.config.get_text_config()
    if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise OtherStructure("no model with lm_head")
    only(model, {"model", "lm_head"})
    only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    heads, kv_heads, head_dim = head_sizes(config)
    layer_types = getattr(config, "layer_types", None)
    frequencies = frequencies_of(base.rotary_emb)
    if frequencies is None:
        raise OtherStructure(f"{type(base.rotary_emb).__name__} rotates by angles of its own")
    kinds, width = [*frequencies], 2 * len(next(iter(frequencies.values())).of_position)
    tables = [kinds.index(layer_types[i]) if len(kinds) > 1 and layer_types else 0 for i in range(len(base.layers))]
    vocab_size, hidden = base.embed_tokens.weight.shape
    return DecoderStructure(
        vocab_size=vocab_size,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=tuple(frequencies.values()),
        layers=tuple(
            _layer(layer, f"model.layers.{index}.", head_dim, width, tables[index])
            for index, layer in enumerate(base.layers)
        ),
        norm=norm_structure(base.norm, "model.norm."),
        head=_linear(model, "", ("lm_head",)),
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


def _layer(layer: Any, prefix: str, head_dim: int, rotated: int, rotary_table: int) -> LayerStructure:
    attention = layer.self_attn
    rest = {name for name, _ in layer.named_children()} - {"resid_attn_dropout", "resid_mlp_dropout"}
    names = next((names for names in _NORMS if rest - {"self_attn", "mlp"} == {*names} - {""}), None)
    if names is None:
        raise OtherStructure(f"a layer of {', '.join(sorted(rest))}")
    norms = [norm_structure(getattr(layer, name), f"{prefix}{name}.") if name else None for name in names]
    if len({norm.epsilon for norm in norms if norm is not None}) > 1:
        raise OtherStructure("norms of a layer with different epsilons")
    return LayerStructure(
        mixer=_attention(attention, f"{prefix}self_attn.", head_dim, rotated, rotary_table),
        mlp=_mlp(layer.mlp, f"{prefix}mlp."),
        input_norm=norms[0],
        out_norm=norms[1],
        inner_norm=norms[2],
        down_norm=norms[3],
        residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _attention(attention: Any, prefix: str, head_dim: int, rotated: int, rotary_table: int) -> AttentionStructure:
    only(attention, _ATTENTION)
    normed = hasattr(attention, "q_norm")
    rotated = rotated if getattr(attention, "use_rope", True) else 0
    order = _halves(head_dim, rotated) if _interleaved(attention) else ()
    if order and normed:
        raise OtherStructure("norms of heads whose neighbouring dimensions are rotated")
    orders = (order, order, ()) if order else ()
    return AttentionStructure(
        qkv=_linear(attention, prefix, ("q_proj", "k_proj", "v_proj"), "qkv_proj", orders),
        out=_linear(attention, prefix, ("o_proj",)),
        query_norm=norm_structure(attention.q_norm, f"{prefix}q_norm.") if normed else None,
        key_norm=norm_structure(attention.k_norm, f"{prefix}k_norm.") if normed else None,
        rotated=rotated,
        rotary_table=rotary_table,
    )


def _mlp(mlp: Any, prefix: str) -> MlpStructure | ExpertsStructure:
    if hasattr(mlp, "experts"):
        return _experts(mlp, prefix)
    only(mlp, _MLP)
    gelu = _is_gelu(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
    gate_up = _linear(mlp, prefix, ("gate_proj", "up_proj"), "gate_up_proj")
    return MlpStructure(gate_up, _linear(mlp, prefix, ("down_proj",)), gelu)


def _experts(mlp: Any, prefix: str) -> ExpertsStructure:
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
    return ExpertsStructure(
        router=f"{prefix}gate.weight",
        gate_up=f"{prefix}experts.gate_up_proj",
        down=f"{prefix}experts.down_proj",
        count=count,
        inner=inner,
        top_k=int(router.top_k),
        normalised=bool(getattr(router, "norm_topk_prob", True)),
    )


def only(module: Any, names: set[str]) -> None:
    """Raises OtherStructure if the module has other parts than these."""
    if others := {name for name, _ in module.named_children()} - names:
        raise OtherStructure(f"{type(module).__name__} with {', '.join(sorted(others))}")


def _linear(
    module: Any, prefix: str, parts: tuple[str, ...], whole: str = "", orders: tuple[tuple[int, ...], ...] = ()
) -> LinearStructure:
    """The parts of the module, or the one that is all of them, as one."""
    names = (whole,) if hasattr(module, whole) else parts
    linears: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(linear) is nn.Linear for linear in linears) or (orders and len(orders) != len(linears)):
        raise OtherStructure(f"{type(module).__name__} without {', '.join(parts)}")
    weights = tuple(f"{prefix}{name}.weight" for name in names)
    biases = tuple("" if m.bias is None else f"{prefix}{name}.bias" for m, name in zip(linears, names, strict=True))
    return LinearStructure(weights, biases, orders or ((),) * len(names))


def norm_structure(norm: Any, prefix: str) -> NormStructure:
    """An RMSNorm of the model. Raises OtherStructure if it is none."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or epsilon is None or getattr(norm, "bias", None) is not None:
        raise OtherStructure(f"{type(norm).__name__} is not an RMSNorm with a weight")
    kind: Any = type(norm)
    return NormStructure(f"{prefix}weight", float(epsilon), _adds_one(kind))


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


def _halves(head_dim: int, rotated: int) -> tuple[int, ...]:
    """The order, of `head_dim` outputs, in which the halves of the first `rotated` dimensions were neighbours."""
    return (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim))


def _embedding_scale(base: Any) -> float:
    """By which the model multiplies the embeddings of its tokens."""
    embed = base.embed_tokens
    scale: Tensor = torch.tensor(float(getattr(embed, "scalar_embed_scale", 1.0))).to(embed.weight.dtype)
    if type(embed) is not nn.Embedding and not hasattr(embed, "scalar_embed_scale"):
        raise OtherStructure(f"the embedding {type(embed).__name__}")
    return float(scale) * float(getattr(base, "embedding_multiplier", 1.0))
