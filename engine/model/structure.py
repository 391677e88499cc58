"""What a lean decoder is made of, as plain data: names of parameters, kinds, sizes and factors.

It is read from a stock model's modules (`engine.model.structure_reader`). A decoder is built from this and from the
parameters alone (`engine.model.decoder`), so that a model whose proof is remembered starts without the stock model's
code.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from engine.kernels.layer.activation import Activation
from engine.kernels.simd import LANES
from engine.model.rotary import Frequencies


class OtherStructure(Exception):
    """The model does not have a structure that the lean decoder knows. Its text says what is unknown."""


class Picked(msgspec.Struct, frozen=True):
    """These outputs of every run of `run` neighbouring ones, in this order."""

    run: int
    outputs: tuple[int, ...]


class LinearStructure(msgspec.Struct, frozen=True):
    """Matrices over the same input, whose outputs follow one another. weights: names of parameters. biases: as many;
    "" where there is none. orders: as many, which of the outputs are taken; None: all, as they are. rounds: rows are
    rounded to 8 bits first, as BitNet does.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    orders: tuple[Picked | None, ...]
    rounds: bool = False


class NormStructure(msgspec.Struct, frozen=True):
    """See `Norm`. adds_one: it multiplies by 1 + weight. factor: and by this. bias: "" if there is none. weight: "" if
    there is none, of `width` numbers.
    """

    weight: str
    epsilon: float
    adds_one: bool
    centred: bool = False
    bias: str = ""
    factor: float = 1.0
    width: int = 0


class MlpStructure(msgspec.Struct, frozen=True, tag=True):
    """How a `GatedMlp` is built. `amounts` names the activation's scalar parameters."""

    gate_up: LinearStructure
    down: LinearStructure
    activation: Activation
    plain: bool = False
    gate_scale: float = 1.0
    amounts: tuple[str, ...] = ()
    sub_norm: NormStructure | None = None


class ExpertsStructure(msgspec.Struct, frozen=True, tag=True):
    """See `ExpertMlp`. gate_up, down: the parameters that hold the matrices of all experts, `count` of them. router:
    its outputs are one for each expert, then the gate of the shared one, if there is one. bias: of the router's choice,
    "" if there is none. gate_up_bias, down_bias: [experts, outputs], "" if there are none. in_turn: the parameters have
    inputs before outputs, and the outputs of gate and up in turn. plain: there is no gate; gate_up is up alone. scales:
    the parameter that multiplies the share of each expert, "" if there is none. norms: as of `ExpertNorms`; (): none.
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
    scales: str = ""
    groups: int = 1
    top_groups: int = 1
    counted: int = 1
    least: float = 1e-20
    shared: MlpStructure | None = None
    shared_gate: bool = True
    activation: Activation = Activation.SILU
    alpha: float = 1.0
    limit: float = 0.0
    gate_up_bias: str = ""
    down_bias: str = ""
    in_turn: bool = False
    plain: bool = False
    norms: tuple[NormStructure, ...] = ()


class LatentStructure(msgspec.Struct, frozen=True):
    """See `LatentWeights`. of_heads: the parameter that makes each head's key and then its value of a latent vector, or
    the two of a file: of keys [heads, latent, key], of values [heads, value, latent].
    """

    query_inputs: LinearStructure | None
    query_norm: NormStructure | None
    keys: LinearStructure
    key_norm: NormStructure
    of_heads: tuple[str, ...]
    key_dim: int
    value_dim: int


class AttentionStructure(msgspec.Struct, frozen=True, tag=True):
    """See `AttentionWeights`. gated: the outputs of `qkv` are queries, keys, values, and a gate for each query, whose
    sigmoid multiplies what attention gives. value_epsilon: of a norm of values without weights, 0 if there is none.
    keys_of: the layer whose keys and values this one reads, None if they are its own. score_scale: multiplies the scale
    of its rule.
    """

    qkv: LinearStructure
    out: LinearStructure
    heads: int
    kv_heads: int
    head_dim: int
    query_norm: NormStructure | None
    key_norm: NormStructure | None
    rotated: int
    rotary_table: int
    gated: bool = False
    value_epsilon: float = 0.0
    values_are_keys: bool = False
    norms_last: bool = False
    keys_of: int | None = None
    score_scale: float = 1.0
    latent: LatentStructure | None = None
    clip: float = 0.0
    sub_norm: NormStructure | None = None


class ChannelGatesStructure(msgspec.Struct, frozen=True):
    """See `ChannelGates`: the two matrices of each, one after the other."""

    forget: tuple[LinearStructure, LinearStructure]
    out: tuple[LinearStructure, LinearStructure]
    forget_bias: str
    rank: int


class GatedDeltaStructure(msgspec.Struct, frozen=True, tag=True):
    """A gated delta net: see `engine.kernels.state.delta`.

    inputs: its outputs are q and k of each key head, then v and z of each value head. gates: b, then a, one for each
    value head. convolution: [channels of q, k and v, width]. decay, dt_bias: one for each value head. decay_is_log: a
    step keeps exp(-exp(decay) * softplus(a + dt_bias)) of the state; otherwise `decay` stands for -exp(decay). norm: of
    each value head, multiplied by SiLU(z). key_head_of: for each value head, the key head that serves it. by_channel:
    as of `GatedDelta`; `dt_bias` is "" then.
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
    by_channel: ChannelGatesStructure | None = None


class MambaStructure(msgspec.Struct, frozen=True, tag=True):
    """Mamba-2: see `engine.kernels.state.mamba`.

    inputs: its outputs are z and x of each head, B and C of each group, and a step of each head. convolution: [channels
    of x, B and C, width]; bias: of it, "" if there is none. decay, dt_bias, skip: one for each head. decay_is_log: it
    stands for -exp(decay). norm: of the numbers of a group, if there is one; gate_last: z multiplies what the norm
    gives, and not what it gets. steps: the limits of the softplus of a step. scales: what multiplies z, x, B, C and the
    step.
    """

    inputs: LinearStructure
    convolution: str
    bias: str
    decay: str
    decay_is_log: bool
    dt_bias: str
    skip: str
    norm: NormStructure | None
    gate_last: bool
    out: LinearStructure
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    width: int
    steps: tuple[float, float]
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)


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


Mixer = AttentionStructure | GatedDeltaStructure | ShortConvolutionStructure | MambaStructure


class PerLayerInputsStructure(msgspec.Struct, frozen=True):
    """See `PerLayerInputs`. embedding: [vocab, layers * width]."""

    project: LinearStructure
    norm: NormStructure
    embedding: str
    embedding_scale: float
    scale: float


class LayerInputStructure(msgspec.Struct, frozen=True):
    """See `LayerInput`."""

    gate: LinearStructure
    out: LinearStructure
    norm: NormStructure
    activation: Activation


class LayerStructure(msgspec.Struct, frozen=True):
    """See `LayerWeights`. mixer: what makes a row of itself and the rows before it. A layer may have a mixer or an MLP
    alone. scale: the name of a number; "" if there is none.
    """

    mixer: Mixer | None
    mlp: MlpStructure | ExpertsStructure | None
    input_norm: NormStructure | None
    out_norm: NormStructure | None
    inner_norm: NormStructure | None
    down_norm: NormStructure | None
    scales: tuple[float, float, float]
    layer_input: LayerInputStructure | None = None
    scale: str = ""
    parallel: bool = False
    beside: MambaStructure | None = None


class KeyPlace(NamedTuple):
    """Where the keys and values are that a layer attends to: the part of the pool, and the layer in it. own: whether
    the layer itself writes them.
    """

    part: int
    layer: int
    own: bool


class DecoderStructure(msgspec.Struct, frozen=True):
    """rotary: of each table. tied: the embedding is the output matrix. logit_divisor, logit_cap: what logits are
    divided by, and capped at by tanh; a cap of 0 is none.
    """

    vocab_size: int
    hidden: int
    rotary: tuple[Frequencies, ...]
    layers: tuple[LayerStructure, ...]
    norm: NormStructure
    head: LinearStructure
    embedding: str
    tied: bool
    embedding_scale: float
    logit_divisor: float
    logit_cap: float
    layer_inputs: PerLayerInputsStructure | None = None

    @property
    def attending(self) -> dict[int, AttentionStructure]:
        """The layers with attention by their numbers; the others have a state."""
        return {at: layer.mixer for at, layer in enumerate(self.layers) if isinstance(layer.mixer, AttentionStructure)}

    @property
    def key_sizes(self) -> list[tuple[int, int, int]]:
        """How many layers write to each part of a pool, their KV heads, and the dimensions of a head. Where no layer
        attends there is one part that nobody writes to: texts are counted in its blocks.
        """
        if not self.attending:
            return [(1, 1, LANES)]
        own = [(mixer.kv_heads, mixer.head_dim) for mixer in self.attending.values() if mixer.keys_of is None]
        return [(count, *shape) for shape, count in Counter(own).items()]

    @property
    def last_keys(self) -> list[KeyPlace]:
        """The keys that a head gets which reads the target's: those of the last layer that has its own, for each rotary
        table, and so for each type of layer, in the order of layers.
        """
        own = {mixer.rotary_table: at for at, mixer in self.attending.items() if mixer.keys_of is None}
        places = dict(zip(self.attending, self.key_places, strict=True))
        return [places[at] for at in sorted(own.values())]

    @property
    def key_pieces(self) -> int:
        """The number of states, as wide as the model, that these keys and their values take."""
        sizes = [self.key_sizes[place.part][1:] for place in self.last_keys]
        return pieces_of(sum(2 * kv_heads * head_dim for kv_heads, head_dim in sizes), self.hidden)

    @property
    def key_places(self) -> list[KeyPlace]:
        """Where each attention layer's keys are in the pool."""
        shapes, found = [shape for _, *shape in self.key_sizes], dict[int, KeyPlace]()
        written = [0] * len(shapes)
        for at, mixer in self.attending.items():
            if mixer.keys_of is not None:
                found[at] = found[mixer.keys_of]._replace(own=False)
                continue
            part = shapes.index([mixer.kv_heads, mixer.head_dim])
            found[at] = KeyPlace(part, written[part], True)
            written[part] += 1
        return [*found.values()]


def pieces_of(numbers: int, hidden: int) -> int:
    """Return how many states of that width so many numbers take: a forward gives keys and values so to a draft head,
    numbered from the one after its last hidden state.
    """
    return -(-numbers // hidden)
