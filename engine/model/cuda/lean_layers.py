"""A lean forward for the common structure on CUDA: ten kernels a layer, where the stock forward launches 44. Layers
may be gated delta nets, whose states are in the pool.

As in `engine.model.decoder` the structure is read from a stock model's modules, and confirmed at load by comparing
logits. The products are `nn.Linear`s over the stock model's own memory: its matrices become views of the joined ones.
The residual stream is kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.attention.attention import Rule
from engine.model.cuda.layer_kernels import entered, gated, normed, opened
from engine.model.cuda.lean_delta import LeanDelta
from engine.model.cuda.padded_rows import PaddedRows
from engine.model.cuda.triton_attention import TritonAttention
from engine.model.decoder_layer import norm_of
from engine.model.kv_pool import KVPool
from engine.model.reader.parts import only
from engine.model.rotary import cosines_sines
from engine.model.structure import OtherStructure


class LeanLayers:
    """Runs padded rows. rules: each layer's attention rule, as the stock forward passed it. context: positions served.

    Raises OtherStructure if the model does not have the common structure, and AttributeError if a part is missing.
    """

    def __init__(self, model: Any, pool: KVPool, q_per_kv: int, rules: dict[int, Rule], context: int):
        base = model.model
        only(model, {"model", "lm_head"})
        only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        self.pool, self.heads = pool, q_per_kv * pool.shape.kv_heads
        self._embedding: nn.Embedding = base.embed_tokens
        self._norm = norm_of(base.norm)
        nets = accumulate((hasattr(layer, "linear_attn") for layer in base.layers), initial=0)
        layers = [_LeanLayer(layer, before) for layer, before in zip(base.layers, nets, strict=False)]
        for at, layer in enumerate(one for one in layers if one.delta_net is None):
            layer.keys_at = at
            made = ((1 + layer.gated) * self.heads + 2 * pool.shape.kv_heads) * pool.shape.head_dim
            if layer.outputs["qkv"] != made:
                raise OtherStructure("layers of different sizes")
        if any(layer.inner != layers[0].inner for layer in layers):
            raise OtherStructure("layers of different sizes")
        if type(self._embedding) is not nn.Embedding or type(model.lm_head) is not nn.Linear:
            raise OtherStructure("embeddings or logits that are computed in another way")
        self._cos_sin = torch.cat(cosines_sines(base.rotary_emb, 0, context, pool.keys.device), dim=1)
        if self._cos_sin.shape[1] > pool.shape.head_dim or self._cos_sin.shape[1] % 2:
            raise OtherStructure("rotation of more than a head")
        for layer in layers:  # not before, because it changes where the model's matrices lie
            layer.join()
        self._layers, self._rules, self._head = layers, dict(rules), model.lm_head

    @property
    def linears(self) -> list[nn.Linear]:
        """All products."""
        return [self._head, *(linear for layer in self._layers for linear in layer.products.values())]

    def __call__(
        self,
        rows: PaddedRows,
        attention: TritonAttention,
        feature_layers: Sequence[int],
        walk: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return all logits, [rows, vocab], and [rows, layers, hidden] hidden states if layers are given.

        rows: on the device. walk: see `engine.model.cuda.device_walk.walk_tensor`; None if no layer has a state.
        """
        embedded = self._embedding(rows.tokens)
        residual, delta, states = embedded.float(), embedded, dict[int, Tensor]()
        for index, layer in enumerate(self._layers):
            x = normed(residual, delta, layer.input_norm, added=index > 0)
            if index in feature_layers:
                states[index] = residual.to(x.dtype, copy=True)  # it is added to in place
            if layer.delta_net is None:
                mixed = self._attended(layer, self._rules[index], x, rows, attention)
            else:
                assert walk is not None and self.pool.layer_states is not None
                mixed = layer.delta_net(x, layer.products, self.pool.layer_states, walk)
            delta = layer.products["out"](mixed)
            x = normed(residual, delta, layer.inner_norm)
            delta = layer.products["down"](gated(layer.products["gate_up"](x)))
        x = normed(residual, delta, self._norm)
        states[len(self._layers)] = x
        logits = self._head(x)
        if not feature_layers:
            return (logits,)
        return logits, torch.stack([states[layer] for layer in feature_layers], dim=1)

    def _attended(
        self, layer: _LeanLayer, rule: Rule, x: Tensor, rows: PaddedRows, attention: TritonAttention
    ) -> Tensor:
        """Return what the layer's last product multiplies."""
        qkv, at = layer.products["qkv"](x), layer.keys_at
        query = entered(self.pool, at, qkv, rows, self._cos_sin, layer.norms, layer.epsilon, layer.gated)
        attended = attention(rows.seen, at, rule, query)
        return opened(attended, qkv) if layer.gated else attended.flatten(1)


class _LeanLayer:
    """One layer: its norms as float32, and its products, which exist once they are joined. index: among the layers with
    a state. delta_net: None if the layer attends; its keys and values are then those of layer `keys_at` of the pool.
    """

    def __init__(self, layer: Any, index: int):
        name, mlp = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn", layer.mlp
        only(layer, {name, "mlp", "input_layernorm", "post_attention_layernorm"})
        only(mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"})
        self.keys_at = 0
        self.norms: Tensor | None = None  # [2, head_dim]: of queries and keys
        self.epsilon, self.gated = 0.0, False  # of these norms; whether each head has a gate
        self.delta_net = LeanDelta(layer.linear_attn, index) if name == "linear_attn" else None
        parts = self._attention(layer.self_attn) if self.delta_net is None else self.delta_net.parts
        self._parts = parts | {"gate_up": [mlp.gate_proj, mlp.up_proj], "down": [mlp.down_proj]}
        for linears in self._parts.values():
            if any(type(linear) is not nn.Linear for linear in linears):
                raise OtherStructure("matrices that are not linear layers")
            if len({linear.bias is None for linear in linears}) != 1:
                raise OtherStructure("biases of some matrices only")
        self.outputs = {name: sum(part.out_features for part in parts) for name, parts in self._parts.items()}
        self.inner = self.outputs["gate_up"] // 2
        self.input_norm = norm_of(layer.input_layernorm)
        self.inner_norm = norm_of(layer.post_attention_layernorm)
        self.products: dict[str, nn.Linear] = {}

    def _attention(self, attention: Any) -> dict[str, list[nn.Linear]]:
        """Read what attention needs, and return its products."""
        only(attention, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
        if hasattr(attention, "q_norm"):
            query_norm, key_norm = norm_of(attention.q_norm), norm_of(attention.k_norm)
            if query_norm.weight.shape != (attention.head_dim,) or key_norm.weight.shape != query_norm.weight.shape:
                raise OtherStructure("norms of more than a head")
            self.norms, self.epsilon = torch.stack([query_norm.weight, key_norm.weight]), query_norm.epsilon
        self.gated = len(attention.q_proj.weight) == 2 * attention.o_proj.weight.shape[1]
        return {"qkv": [attention.q_proj, attention.k_proj, attention.v_proj], "out": [attention.o_proj]}

    def join(self) -> None:
        self.products = {name: _joined(parts) for name, parts in self._parts.items()}


def _joined(parts: list[nn.Linear]) -> nn.Linear:
    """Return one product in the place of several over the same input, which become views of it."""
    if len(parts) == 1:
        return parts[0]
    whole = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), device="meta")
    for name in ("weight", "bias"):
        held = [getattr(part, name) for part in parts]
        if held[0] is None:
            whole.bias = None
            continue
        joined = torch.cat([tensor.detach() for tensor in held])
        setattr(whole, name, nn.Parameter(joined, requires_grad=False))
        for tensor, view in zip(held, joined.split([len(tensor) for tensor in held]), strict=True):
            tensor.data = view
    return whole
