"""What one decoder layer computes with, in the form that `engine.kernels.layer.program` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.kernels.gemm.matmul import Matmul, Multiplies
from engine.kernels.layer.activation import Activation
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.state.walk import StateLayer


@dataclass(frozen=True)
class Norm:
    """x / sqrt(mean(x^2) + epsilon) * weight, plus the bias. weight, bias: float32. centred: of x less its mean."""

    weight: Tensor
    epsilon: float
    centred: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True)
class GatedMlp:
    """down(act(gate_scale * gate) * up), or down(act(gate)) if it is `plain`. gate_up: hidden to 2 * inner or, where it
    is plain, or the product is `gated` and applies SiLU itself, to inner. amounts: the two of XIELU. sub_norm: of what
    `down` gets.
    """

    gate_up: Multiplies
    down: Multiplies
    inner: int
    gated: bool
    activation: Activation = Activation.SILU
    plain: bool = False
    gate_scale: float = 1.0
    amounts: Sequence[float] = (0.0, 0.0)
    sub_norm: Norm | None = None


class ExpertNorms(NamedTuple):
    """See `ExpertMlp`."""

    router: Norm
    inputs: Norm
    shared: Norm
    outputs: Norm


@dataclass(frozen=True)
class ExpertMlp:
    """Some of many gated MLPs for each row. router: hidden to experts and, if there is a shared one, to its gate;
    gate_up, down: of each expert, gated. normalised: the shares of the `top_k` that are chosen sum to 1. sigmoid: a
    share is the sigmoid of an expert's logit, and not the softmax of all; least: added to the sum of those of the
    chosen, by which they are divided. bias: [experts] float32, added to what
    experts are chosen by. scale: of all shares; scales: [experts] float32, of those of each. groups: experts are chosen
    of the `top_groups` whose `counted` best, one or two, have the largest sum. shared: an MLP of every row, times the
    sigmoid of its gate if `shared_gate`. gated: whether gate_up applies SiLU itself; otherwise the activation comes
    after it. plain: as of `GatedMlp`. norms: if the shared MLP alone gets the inner norm of the residual, those of what
    the router and the experts get of it, and of what the shared one and the experts make.
    """

    router: Multiplies
    gate_up: Sequence[Matmul]
    down: Sequence[Matmul]
    inner: int
    top_k: int
    normalised: bool
    sigmoid: bool = False
    bias: Tensor | None = None
    scale: float = 1.0
    scales: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    counted: int = 1
    least: float = 1e-20
    shared: GatedMlp | None = None
    shared_gate: bool = True
    gated: bool = True
    activation: Activation = Activation.SILU
    alpha: float = 1.0
    limit: float = 0.0
    plain: bool = False
    norms: ExpertNorms | None = None


@dataclass(frozen=True)
class LatentWeights:
    """Multi-head latent attention: all heads have one key, which is a rotated part and then a latent vector; the vector
    is the value too. What would make a head's key of the vector is applied to its query instead, and what would make
    its value, to what attention gives: the pool holds one vector, and not keys and values of every head.

    query_inputs, query_norm: what `qkv`, of queries alone, gets of x; None: x itself. keys: hidden to the rotated part
    and the vector, of which key_norm is. to_latent: for each head, what multiplies the first part of its query; the
    rest is rotated. to_values: for each head, of the vector.
    """

    query_inputs: Multiplies | None
    query_norm: Norm | None
    keys: Multiplies
    key_norm: Norm
    to_latent: Sequence[Matmul]
    to_values: Sequence[Matmul]


@dataclass(frozen=True)
class AttentionWeights:
    """Attention with grouped queries. A norm that is None is left out.

    qkv: hidden to (q_per_kv + 2) * kv_heads * head_dim; out: back to hidden. query_norm, key_norm: of each head, or of
    all heads at once if their weights are as long; value_norm: of each head. norms_last: they come after rotation.
    values_are_keys: `qkv` ends after the keys, which are the values too, before norm and rotation. rotated: how many
    dimensions of a head are, by the rotary table of that number. gated: `qkv` makes a gate for each query too, after
    the values, whose sigmoid multiplies what attention gives. latent: what else there is of latent attention, whose
    `qkv` makes queries alone. clip: the most that a number of `qkv` is, and the least, 0: none. sub_norm: of what `out`
    gets.
    """

    qkv: Multiplies
    out: Multiplies
    query_norm: Norm | None
    key_norm: Norm | None
    rotated: int
    rotary_table: int = 0
    gated: bool = False
    value_norm: Norm | None = None
    values_are_keys: bool = False
    norms_last: bool = False
    latent: LatentWeights | None = None
    clip: float = 0.0
    sub_norm: Norm | None = None


@dataclass(frozen=True)
class PerLayerInputs:
    """What the layers get of the tokens beside the residual, [rows, layers * width]: the norm of `project` of the
    tokens' embeddings, of each layer by itself, and the tokens' rows of an embedding of their own, times
    `embedding_scale`; and `scale` times all of that.
    """

    project: Multiplies
    norm: Norm
    embedding: Tensor | TiledMatrix
    embedding_scale: float
    scale: float


@dataclass(frozen=True)
class LayerInput:
    """How one layer takes its part of `PerLayerInputs`, `width` numbers a row: residual += norm(out(act(gate(residual))
    * the part)).
    """

    gate: Multiplies
    out: Multiplies
    width: int
    norm: Norm
    activation: Activation


@dataclass(frozen=True)
class LayerWeights:
    """What is None is left out.

    mixer: what makes a row of itself and the rows before it; mlp: comes after it, or alone. input_norm, inner_norm:
    before the mixer and before the MLP; out_norm, down_norm: of what the mixer and the MLP add to the residual, with
    the epsilon of the norm after them. beside: what adds to the residual what it makes of the mixer's input. scales: of
    what the mixer, that, and the MLP add, where there is no such norm. layer_input: what else is added, if anything;
    scale: by which the residual is multiplied at the end. parallel: the MLP gets the input norm of the residual, or
    `inner_norm` of it, without what the mixer adds.
    """

    mixer: AttentionWeights | StateLayer | None
    mlp: GatedMlp | ExpertMlp | None
    input_norm: Norm | None
    inner_norm: Norm | None
    out_norm: Norm | None = None
    down_norm: Norm | None = None
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    layer_input: LayerInput | None = None
    scale: float = 1.0
    parallel: bool = False
    beside: StateLayer | None = None
