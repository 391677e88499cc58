"""What a lean decoder is made of, as plain data: names of parameters, kinds, sizes and factors.

It is read from a stock model's modules (`engine.model.structure_reader`). A decoder is built from this and from the
parameters alone (`engine.model.decoder`), so that a model whose proof is remembered starts without the stock model's
code.
"""

from __future__ import annotations

import msgspec

from engine.model.rotary import Frequencies


class OtherStructure(Exception):
    """The model does not have a structure that the lean decoder knows. Its text says what is unknown."""


class Picked(msgspec.Struct, frozen=True):
    """These outputs of every run of `run` neighbouring ones, in this order."""

    run: int
    outputs: tuple[int, ...]


class LinearStructure(msgspec.Struct, frozen=True):
    """Matrices over the same input, whose outputs follow one another. weights: names of parameters. biases: as many;
    "" where there is none. orders: as many, which of the outputs are taken; None: all, as they are.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    orders: tuple[Picked | None, ...]


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
    """See `ExpertMlp`. gate_up, down: the parameters that hold the matrices of all experts, `count` of them. router:
    its outputs are one for each expert, then the gate of the shared one, if there is one. bias: of the router's choice,
    "" if there is none.
    """

    router: LinearStructure
    gate_up: str
    down: str
    count: int
    inner: int
    top_k: int
    normalised: bool
    sigmoid: bool = False
    bias: str = ""
    scale: float = 1.0
    shared: MlpStructure | None = None


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
