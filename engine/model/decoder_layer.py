"""The weights of a lean decoder (`engine.model.decoder`), a layer at a time, from its structure and its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.config import Activations
from engine.core.state_shape import StateShape
from engine.kernels.gemm.product import Product
from engine.kernels.layer.activation import Activation
from engine.kernels.layer.weights import (
    AttentionWeights,
    ExpertMlp,
    ExpertNorms,
    GatedMlp,
    LatentWeights,
    LayerInput,
    LayerWeights,
    Norm,
)
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.state.delta import ChannelGates, GatedDelta, delta_sizes
from engine.kernels.state.mamba import Mamba, mamba_sizes
from engine.kernels.state.short_convolution import ShortConvolution, short_convolution_sizes
from engine.kernels.state.walk import StateLayer
from engine.kernels.state.windows import taps_of
from engine.model.reader.parts import rms_structure
from engine.model.reader.ternary import is_ternary, ternary_matrix
from engine.model.structure import (
    ChannelGatesStructure,
    DecoderStructure,
    ExpertsStructure,
    GatedDeltaStructure,
    LatentStructure,
    LayerInputStructure,
    LayerStructure,
    LinearStructure,
    MambaStructure,
    Mixer,
    MlpStructure,
    NormStructure,
    OtherStructure,
    Picked,
    ShortConvolutionStructure,
)


class Parameters(Protocol):
    """Where the parameters of the stock model are, by their names."""

    def matrix(self, name: str) -> Tensor | StoredMatrix: ...
    def experts(self, name: str, parts: int = 0) -> Sequence[Tensor | Sequence[StoredMatrix]]:
        """Return each expert's matrix [outputs, inputs], or the parts of it. parts: 0, or how many matrices the
        parameter holds in turn, with inputs before outputs.
        """
        ...

    def vector(self, name: str) -> Tensor: ...


class InMemory:
    """Parameters of a model in memory."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def matrix(self, name: str) -> Tensor | StoredMatrix:
        owner = self.model.get_submodule(name.rpartition(".")[0])
        return ternary_matrix(owner) if is_ternary(owner) else self.model.get_parameter(name)

    def experts(self, name: str, parts: int = 0) -> Sequence[Tensor]:
        matrices = self.model.get_parameter(name).detach()
        return [apart(matrix.T, parts) if parts else matrix for matrix in matrices]

    def vector(self, name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        found: Tensor = getattr(self.model.get_submodule(module), part)
        return found


def apart(outputs: Tensor, parts: int) -> Tensor:
    """Separate the outputs of several matrices, which lie in turn, and join each matrix's outputs."""
    return outputs.unflatten(0, (-1, parts)).transpose(0, 1).flatten(0, 1).contiguous()


class Layer:
    """One layer's weights, as a program takes them.

    products: every matrix that a row is multiplied with; of experts, as many as a row has. idle_bytes: of the others.
    activations: how matrices in blocks take their rows. dtype: of rows.
    """

    def __init__(self, layer: LayerStructure, parameters: Parameters, activations: Activations, dtype: torch.dtype):
        self.idle_bytes, self._parameters, self._activations = 0, parameters, activations
        self._width = dtype.itemsize
        mixer, of_mixer = (None, []) if layer.mixer is None else self._mixer(layer.mixer)
        mlp, of_mlp = (None, []) if layer.mlp is None else self._mlp_or_experts(layer.mlp)
        added, of_added = (None, []) if layer.layer_input is None else self._layer_input(layer.layer_input)
        beside, of_beside = (None, []) if layer.beside is None else self._mamba(layer.beside)
        self.products: tuple[Product, ...] = (*of_mixer, *of_mlp, *of_added, *of_beside)
        self.weights = LayerWeights(
            mixer=mixer,
            mlp=mlp,
            input_norm=self._norm(layer.input_norm),
            out_norm=self._norm(layer.out_norm),
            inner_norm=self._norm(layer.inner_norm),
            down_norm=self._norm(layer.down_norm),
            scales=layer.scales,
            beside=beside,
            layer_input=added,
            parallel=layer.parallel,
            scale=float(parameters.vector(layer.scale)) if layer.scale else 1.0,
        )

    def _mixer(self, mixer: Mixer) -> tuple[AttentionWeights | StateLayer, list[Product]]:
        """Return the weights that mix rows, and the matrices that a row is multiplied with."""
        if isinstance(mixer, MambaStructure):
            return self._mamba(mixer)
        if isinstance(mixer, GatedDeltaStructure):
            return self._delta(mixer)
        if isinstance(mixer, ShortConvolutionStructure):
            return self._short_convolution(mixer)
        qkv, out = self._joined(mixer.qkv), self._joined(mixer.out)
        latent, of_latent = (None, []) if mixer.latent is None else self._latent(mixer.latent, mixer.heads)
        attention = AttentionWeights(
            qkv=qkv,
            out=out,
            query_norm=self._norm(mixer.query_norm),
            key_norm=self._norm(mixer.key_norm),
            rotated=mixer.rotated,
            rotary_table=mixer.rotary_table,
            gated=mixer.gated,
            value_norm=_norm_of_ones(mixer.head_dim, mixer.value_epsilon) if mixer.value_epsilon else None,
            values_are_keys=mixer.values_are_keys,
            norms_last=mixer.norms_last,
            latent=latent,
            clip=mixer.clip,
            sub_norm=self._norm(mixer.sub_norm),
        )
        return attention, [qkv, out, *of_latent]

    def _latent(self, latent: LatentStructure, heads: int) -> tuple[LatentWeights, list[Product]]:
        inputs, keys = latent.query_inputs, self._joined(latent.keys)
        query_inputs = None if inputs is None else self._joined(inputs)
        matrices = self._of_heads(latent, heads)
        products = [[Product(matrix, activations=self._activations) for matrix in some] for some in matrices]
        to_latent, to_values = [[one.matmul for one in some if one.matmul is not None] for some in products]
        if not len(to_latent) == len(to_values) == heads:
            raise OtherStructure("heads, which this processor cannot multiply apart")
        norms = self._norm(latent.query_norm), norm_from(latent.key_norm, self._parameters)
        weights = LatentWeights(query_inputs, norms[0], keys, norms[1], to_latent, to_values)
        return weights, [keys, *([] if query_inputs is None else [query_inputs]), *products[0], *products[1]]

    def _of_heads(self, latent: LatentStructure, heads: int) -> Sequence[Sequence[Tensor | Sequence[StoredMatrix]]]:
        """Return [latent, key] and [value, latent] of each head. In blocks, the first of a whole matrix is numbers."""
        if len(latent.of_heads) == 2:
            return [self._parameters.experts(name) for name in latent.of_heads]
        [name] = latent.of_heads
        whole, key, each = self._parameters.matrix(name), latent.key_dim, latent.key_dim + latent.value_dim
        starts = range(0, heads * each, each)
        if isinstance(whole, Tensor):
            return [whole[at : at + key].T.contiguous() for at in starts], [
                whole[at + key : at + each] for at in starts
            ]
        keys = [StoredMatrix.of_numbers(whole.row_slice(at, at + key).values().T) for at in starts]
        return [[one] for one in keys], [[whole.row_slice(at + key, at + each)] for at in starts]

    def _delta(self, mixer: GatedDeltaStructure) -> tuple[GatedDelta, list[Product]]:
        vector, norm = self._parameters.vector, made_norm(mixer.norm, self._parameters.vector(mixer.norm.weight))
        inputs, gates, out = (self._joined(linear) for linear in (mixer.inputs, mixer.gates, mixer.out))
        by_channel, of_channels = (None, []) if mixer.by_channel is None else self._channel_gates(mixer.by_channel)
        delta = GatedDelta(
            inputs=inputs,
            gates=gates,
            out=out,
            taps=taps_of(vector(mixer.convolution)),
            decay=self._decay(mixer),
            dt_bias=self._numbers(mixer.dt_bias) if mixer.dt_bias else torch.zeros(0),
            norm=norm.weight,
            epsilon=norm.epsilon,
            key_heads=mixer.key_heads,
            value_heads=mixer.value_heads,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            key_head_of=torch.tensor(mixer.key_head_of, dtype=torch.int32),
            width=self._width,
            by_channel=by_channel,
        )
        return delta, [inputs, gates, out, *of_channels]

    def _channel_gates(self, gates: ChannelGatesStructure) -> tuple[ChannelGates, list[Product]]:
        products = [self._joined(linear) for linear in (*gates.forget, *gates.out)]
        forget_low, forget_high, out_low, out_high = products
        bias = self._numbers(gates.forget_bias)
        return ChannelGates((forget_low, forget_high), (out_low, out_high), bias, gates.rank), products

    def _short_convolution(self, mixer: ShortConvolutionStructure) -> tuple[ShortConvolution, list[Product]]:
        inputs, out = self._joined(mixer.inputs), self._joined(mixer.out)
        taps = taps_of(self._parameters.vector(mixer.convolution))
        bias = self._numbers(mixer.bias) if mixer.bias else torch.zeros(taps.shape[1], dtype=torch.float32)
        return ShortConvolution(inputs, out, taps, bias, self._width), [inputs, out]

    def _mamba(self, mixer: MambaStructure) -> tuple[Mamba, list[Product]]:
        inputs, out = self._joined(mixer.inputs), self._joined(mixer.out)
        norm, taps = self._norm(mixer.norm), taps_of(self._parameters.vector(mixer.convolution))
        of_gate, *of_channels, of_step = mixer.scales
        counts = torch.tensor([mixer.heads * mixer.head_dim, *[mixer.groups * mixer.state_dim] * 2])
        mamba = Mamba(
            inputs=inputs,
            out=out,
            taps=(taps * torch.tensor(of_channels, dtype=torch.float32).repeat_interleave(counts)).contiguous(),
            bias=self._numbers(mixer.bias) if mixer.bias else torch.zeros(taps.shape[1], dtype=torch.float32),
            decay=self._decay(mixer),
            dt_bias=self._numbers(mixer.dt_bias),
            skip=self._numbers(mixer.skip),
            norm=None if norm is None else norm.weight,
            gate_last=mixer.gate_last,
            epsilon=0.0 if norm is None else norm.epsilon,
            heads=mixer.heads,
            groups=mixer.groups,
            head_dim=mixer.head_dim,
            state_dim=mixer.state_dim,
            steps=mixer.steps,
            gate_scale=of_gate,
            step_scale=of_step,
            width=self._width,
        )
        return mamba, [inputs, out]

    def _decay(self, mixer: GatedDeltaStructure | MambaStructure) -> Tensor:
        """Return the factor of each head's step in the exponent of the share of the state that is kept."""
        decay = self._numbers(mixer.decay).flatten()
        return -decay.exp() if mixer.decay_is_log else decay

    def _numbers(self, name: str) -> Tensor:
        """Return a vector as kernels read it: contiguous float32."""
        return self._parameters.vector(name).detach().float().contiguous()

    def _joined(self, linear: LinearStructure) -> Product:
        return joined(linear, self._parameters, self._activations)

    def _norm(self, norm: NormStructure | None) -> Norm | None:
        return None if norm is None else norm_from(norm, self._parameters)

    def _mlp_or_experts(self, mlp: MlpStructure | ExpertsStructure) -> tuple[GatedMlp | ExpertMlp, list[Product]]:
        return self._mlp(mlp) if isinstance(mlp, MlpStructure) else self._experts(mlp)

    def _mlp(self, mlp: MlpStructure) -> tuple[GatedMlp, list[Product]]:
        """Return the MLP, and the matrices that a row is multiplied with."""
        silu = mlp.activation is Activation.SILU and not mlp.plain and mlp.gate_scale == 1  # products apply that
        gate_up, down = joined(mlp.gate_up, self._parameters, self._activations, gated=silu), self._joined(mlp.down)
        amounts = [float(softplus(self._parameters.vector(name).detach().float())) for name in mlp.amounts]
        kind = mlp.activation, mlp.plain, mlp.gate_scale, amounts or (0.0, 0.0)
        sub_norm = self._norm(mlp.sub_norm)
        return GatedMlp(gate_up, down, down.inputs, gate_up.gated, *kind, sub_norm), [gate_up, down]

    def _layer_input(self, added: LayerInputStructure) -> tuple[LayerInput, list[Product]]:
        gate, out = self._joined(added.gate), self._joined(added.out)
        norm = norm_from(added.norm, self._parameters)
        return LayerInput(gate, out, out.inputs, norm, added.activation), [gate, out]

    def _experts(self, mlp: ExpertsStructure) -> tuple[ExpertMlp, list[Product]]:
        """Return the experts, and the matrices that a row is multiplied with."""
        parameters, take, parts = self._parameters, self._activations, 1 if mlp.plain else 2
        gated = mlp.activation is Activation.SILU and not mlp.plain
        gate_up, down = (
            [
                Product(matrix, bias, gated and part == 2, take)
                for matrix, bias in zip(
                    parameters.experts(name, part if mlp.in_turn else 0), self._biases(of, part, mlp), strict=True
                )
            ]
            for name, of, part in ((mlp.gate_up, mlp.gate_up_bias, parts), (mlp.down, mlp.down_bias, 1))
        )
        multiplied = [[p.matmul for p in products if p.matmul is not None] for products in (gate_up, down)]
        if not all(len(matmuls) == mlp.count for matmuls in multiplied):
            raise OtherStructure("experts, which this processor cannot multiply apart")
        router = joined(mlp.router, parameters, "bfloat16")
        shared, of_shared = (None, []) if mlp.shared is None else self._mlp(mlp.shared)
        self.idle_bytes = sum(product.bytes for product in [*gate_up[mlp.top_k :], *down[mlp.top_k :]])
        mixed = ExpertMlp(
            router=router,
            gate_up=multiplied[0],
            down=multiplied[1],
            inner=mlp.inner,
            top_k=mlp.top_k,
            normalised=mlp.normalised,
            sigmoid=mlp.sigmoid,
            bias=self._numbers(mlp.bias) if mlp.bias else None,
            scale=mlp.scale,
            scales=self._numbers(mlp.scales) if mlp.scales else None,
            groups=mlp.groups,
            top_groups=mlp.top_groups,
            counted=mlp.counted,
            least=mlp.least,
            shared=shared,
            shared_gate=mlp.shared_gate,
            gated=gated,
            activation=mlp.activation,
            alpha=mlp.alpha,
            limit=mlp.limit,
            plain=mlp.plain,
            norms=ExpertNorms(*(norm_from(norm, parameters) for norm in mlp.norms)) if mlp.norms else None,
        )
        return mixed, [router, *gate_up[: mlp.top_k], *down[: mlp.top_k], *of_shared]

    def _biases(self, name: str, parts: int, mlp: ExpertsStructure) -> Sequence[Tensor | None]:
        """Return the bias of each expert. parts: as for `Parameters.experts`."""
        if not name:
            return [None] * mlp.count
        return [apart(bias, parts) if mlp.in_turn else bias for bias in self._parameters.vector(name).detach()]


def state_shape(structure: DecoderStructure, dtype: torch.dtype) -> StateShape | None:
    """Return what layers with a state keep of a request; None if all layers have keys and values. dtype: of rows."""
    sizes = []
    for mixer in (mixer for layer in structure.layers for mixer in (layer.mixer, layer.beside)):
        if isinstance(mixer, GatedDeltaStructure):
            heads = mixer.key_heads, mixer.value_heads, mixer.key_dim, mixer.value_dim
            sizes.append(delta_sizes(*heads, mixer.width, dtype.itemsize, mixer.by_channel is not None))
        elif isinstance(mixer, ShortConvolutionStructure):
            sizes.append(short_convolution_sizes(structure.hidden, mixer.width, dtype.itemsize))
        elif isinstance(mixer, MambaStructure):
            heads = mixer.heads, mixer.groups, mixer.head_dim, mixer.state_dim
            sizes.append(mamba_sizes(*heads, mixer.width, dtype.itemsize))
    return StateShape(tuple(state for state, _ in sizes), tuple(row for _, row in sizes)) if sizes else None


def norm_of(norm: Any) -> Norm:
    """Return an RMSNorm of a stock model. Raises OtherStructure if it is none."""
    return made_norm(rms_structure(norm, ""), norm.weight)


def _norm_of_ones(width: int, epsilon: float) -> Norm:
    """Return a norm that only divides by the length."""
    return Norm(torch.ones(width, dtype=torch.float32), epsilon)


def norm_from(norm: NormStructure, parameters: Parameters) -> Norm:
    """Return the norm with the parameters its structure names."""
    if not norm.weight:
        return Norm(torch.ones(norm.width, dtype=torch.float32), norm.epsilon, norm.centred)
    bias = parameters.vector(norm.bias).detach().float().contiguous() if norm.bias else None
    return made_norm(norm, parameters.vector(norm.weight), bias)


def made_norm(norm: NormStructure, weight: Tensor, bias: Tensor | None = None) -> Norm:
    """Return the norm that `norm` describes, with this weight and bias."""
    factors = norm.factor * (weight.detach().float() + (1 if norm.adds_one else 0))
    return Norm(factors.contiguous(), norm.epsilon, norm.centred, bias)


def joined(linear: LinearStructure, parameters: Parameters, activations: Activations, gated: bool = False) -> Product:
    """Return one product that replaces several over the same input. activations: the type to which it rounds its rows,
    if it is in blocks.
    """
    product = _joined(linear, parameters, activations, gated)
    product.rounds = linear.rounds
    return product


def _joined(linear: LinearStructure, parameters: Parameters, activations: Activations, gated: bool) -> Product:
    found = {name: parameters.matrix(name) for name in dict.fromkeys(linear.weights)}
    weights = [_picked(found[name], order) for name, order in zip(linear.weights, linear.orders, strict=True)]
    bias = _bias(linear, parameters, [found[name].shape[0] for name in linear.weights])
    stored = [part for part in weights if isinstance(part, StoredMatrix)]
    if stored:  # a file holds all matrices of a model
        return Product(stored, bias, gated, activations)
    return Product(weights[0] if len(weights) == 1 else torch.cat(weights), bias, gated)


def _bias(linear: LinearStructure, parameters: Parameters, outputs: Sequence[int]) -> Tensor | None:
    """Return the joined bias; parts without one get zeros. None if no part has one."""
    if not any(linear.biases):
        return None
    held = [parameters.vector(name) if name else None for name in linear.biases]
    dtype = next(bias.dtype for bias in held if bias is not None)
    whole = [
        torch.zeros(count, dtype=dtype) if bias is None else bias for bias, count in zip(held, outputs, strict=True)
    ]
    return torch.cat([_picked(bias, order) for bias, order in zip(whole, linear.orders, strict=True)])


def _picked(part: Any, order: Picked | None) -> Any:
    """Return the picked outputs of a tensor or of a file's matrix."""
    if order is None:
        return part
    whole = torch.arange(part.shape[0]).unflatten(0, (-1, order.run))[:, list(order.outputs)].flatten()
    return part.reordered(whole.numpy()) if isinstance(part, StoredMatrix) else part[whole]
