"""A lean forward for the common structure: pre-norm, RMSNorm, rotary positions, grouped queries, gated SiLU.

It takes the weights of a loaded stock model. Whether a model has this structure is read from its modules, never from
its family's name, and shown by comparing logits with the stock forward's (`engine.model.target`); every other model
keeps the stock forward. A layer is four products, one call of attention, and three fused kernels between them: a token
of a model of 135 M parameters takes 300 calls instead of 1,500. The residual stream is kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.model.attention import Attention, Rule
from engine.model.fused import ENTER, GATE, NORM, enter_kernel, gate_kernel, norm_kernel
from engine.model.kv_pool import KVPool
from engine.model.packed_linear import Product
from engine.model.simd import LANES


class OtherStructure(Exception):
    """The model is not built like that."""


class _Layer:
    """One layer's weights: four products, and the scales of its norms as float32."""

    def __init__(self, layer: Any):
        parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        _only(layer, parts | {"resid_attn_dropout", "resid_mlp_dropout"})
        attention, mlp = layer.self_attn, layer.mlp
        _only(attention, {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"})
        _only(mlp, {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"})
        self.qkv = _joined(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        self.out = _joined(attention, ("o_proj",))
        self.gate_up = _joined(mlp, ("gate_proj", "up_proj"), "gate_up_proj")
        self.down = _joined(mlp, ("down_proj",))
        self.input_norm, self.epsilon = _scale(layer.input_layernorm)
        self.inner_norm, _ = _scale(layer.post_attention_layernorm)
        self.query_norm = self.key_norm = None
        if hasattr(attention, "q_norm"):
            (self.query_norm, _), (self.key_norm, _) = _scale(attention.q_norm), _scale(attention.k_norm)
        self.inner = self.gate_up.outputs // 2


class LeanDecoder:
    """Runs batches. rules: what each layer asks of attention, as the stock forward handed it over."""

    def __init__(self, model: Any, pool: KVPool, groups: int, rules: dict[int, Rule]):
        base = getattr(model, "model", None)
        if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
            raise OtherStructure
        _only(model, {"model", "lm_head"})
        _only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        self.layers = [_Layer(layer) for layer in base.layers]
        self.rules = [rules[i] for i in range(len(self.layers))]
        self.embedding: Tensor = base.embed_tokens.weight
        self.norm, self.epsilon = _scale(base.norm)
        self.head = Product(model.lm_head.weight, model.lm_head.bias)
        self.hidden, self.dtype = self.embedding.shape[1], self.embedding.dtype
        self.attention = Attention(pool, groups)
        self.width = groups * pool.shape.kv_heads * pool.shape.head_dim
        self._turns = _Turns(base.rotary_emb)
        self._check_sizes(pool)
        self._norm, self._gate, self._enter = (np.zeros(1, kind) for kind in (NORM, GATE, ENTER))
        self._fill_constants(pool)
        self._scratch = torch.zeros(0)

    @property
    def exact(self) -> bool:
        """Whether the products' results are row by row the same bits."""
        layers = ((layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self.layers)
        return all(product.rows is not None for products in (*layers, (self.head,)) for product in products)

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits of the chosen rows, [chosen, vocab], and features [rows, layers, hidden] if layers are asked."""
        rows = len(batch)
        self._begin(batch)
        features: dict[int, Tensor] = {}
        residual = self.embedding.index_select(0, torch.from_numpy(batch.tokens)).float()
        x, attended = residual.new_empty(rows, self.hidden, dtype=self.dtype), self._empty(rows, self.width)
        inner = self._empty(rows, self.layers[0].inner)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            self._add_norm(residual, delta, layer.input_norm, x)
            if index in feature_layers:
                features[index] = residual.to(self.dtype, copy=True)
            self._attend(index, layer.qkv(x), attended)
            self._add_norm(residual, layer.out(attended), layer.inner_norm, x)
            self._gated(layer.gate_up(x), inner)
            delta = layer.down(inner)
        last = len(self.layers)
        chosen = torch.from_numpy(batch.chosen)
        whole = len(chosen) == rows or last in feature_layers
        self._add_norm(residual, delta, self.norm, x, None if whole else batch.chosen)
        if last in feature_layers:
            features[last] = x
        ends = x[: len(chosen)] if not whole else x if len(chosen) == rows else x.index_select(0, chosen)
        logits = self.head(ends) if len(chosen) else self._empty(0, self.head.outputs)
        return logits, torch.stack([features[i] for i in feature_layers], dim=1) if feature_layers else None

    def _begin(self, batch: Batch) -> None:
        self.attention.begin(batch)
        self._turns.reserve(int(batch.positions.max()) + 1)
        if self._scratch.numel() < (needed := torch.get_num_threads() * self.attention.pool.shape.dims):
            self._scratch = torch.zeros(needed)
        enter = self._enter[0]
        enter["positions"], enter["slots"] = batch.positions.ctypes.data, batch.slots.ctypes.data
        enter["turns"], enter["rows"] = self._turns.table.data_ptr(), len(batch)
        enter["queries"], enter["scratch"] = self.attention.queries.data_ptr(), self._scratch.data_ptr()

    def _add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, chosen: Any = None
    ) -> None:
        record = self._norm[0]
        record["residual"], record["delta"] = residual.data_ptr(), 0 if delta is None else delta.data_ptr()
        record["weight"], record["out"] = weight.data_ptr(), out.data_ptr()
        record["chosen"] = 0 if chosen is None else chosen.ctypes.data
        record["count"] = count = len(residual) if chosen is None else len(chosen)
        norm_kernel()(self._norm.ctypes.data, count // _ROWS_WORTH_SHARING)

    def _attend(self, index: int, qkv: Tensor, out: Tensor) -> None:
        layer, record = self.layers[index], self._enter[0]
        record["qkv"] = qkv.data_ptr()
        record["keys"], record["values"] = self.attention.layer_addresses(index)
        record["query_norm"] = 0 if layer.query_norm is None else layer.query_norm.data_ptr()
        record["key_norm"] = 0 if layer.key_norm is None else layer.key_norm.data_ptr()
        enter_kernel()(self._enter.ctypes.data, len(qkv) // _ROWS_WORTH_SHARING)
        self.attention.attend(index, self.rules[index], out)

    def _gated(self, gate_up: Tensor, out: Tensor) -> None:
        record = self._gate[0]
        record["gate_up"], record["out"], record["rows"] = gate_up.data_ptr(), out.data_ptr(), len(out)
        gate_kernel()(self._gate.ctypes.data, len(out))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype)

    def _check_sizes(self, pool: KVPool) -> None:
        shape, layer = pool.shape, self.layers[0]
        made = self.width + 2 * shape.kv_heads * shape.head_dim
        if any(other.qkv.outputs != made or other.inner != layer.inner for other in self.layers):
            raise OtherStructure
        if self.hidden % LANES or layer.inner % LANES or self._turns.width > shape.head_dim:
            raise OtherStructure

    def _fill_constants(self, pool: KVPool) -> None:
        shape, size = pool.shape, self.dtype.itemsize
        norm, gate, enter = self._norm[0], self._gate[0], self._enter[0]
        norm["hidden"], norm["width"], norm["epsilon"] = self.hidden, size, self.epsilon
        gate["inner"], gate["width"] = self.layers[0].inner, size
        enter["kv_heads"], enter["groups"] = shape.kv_heads, self.attention.groups
        enter["head_dim"], enter["dims"], enter["rotated"] = shape.head_dim, shape.dims, self._turns.width
        enter["width"], enter["epsilon"] = size, self.layers[0].epsilon


_ROWS_WORTH_SHARING = 8  # waking the other threads costs as much as this many rows of a small kernel


class _Turns:
    """Cosines and sines of all positions so far: table [positions, rotated] float32, first cosines, then sines."""

    def __init__(self, rotary: Any):
        self._rotary = rotary
        self.table = torch.zeros(0)
        self.reserve(256)
        self.width = self.table.shape[1]

    def reserve(self, positions: int) -> None:
        if positions <= len(self.table):
            return
        cosines, sines = self._rotary(torch.zeros(1), torch.arange(2 * positions)[None])
        half = cosines.shape[-1] // 2
        self.table = torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=1).float().contiguous()


def _only(module: Any, names: set[str]) -> None:
    """The module has no parts but these."""
    if {name for name, _ in module.named_children()} - names:
        raise OtherStructure


def _joined(module: Any, parts: tuple[str, ...], whole: str = "") -> Product:
    """One product in the place of several over the same input."""
    linears: list[Any] = [getattr(module, name, None) for name in ((whole,) if hasattr(module, whole) else parts)]
    if not all(type(linear) is nn.Linear for linear in linears):
        raise OtherStructure
    biases = [linear.bias for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [b if b is not None else m.weight.new_zeros(m.out_features) for b, m in zip(biases, linears, strict=True)]
        )
    return Product(torch.cat([linear.weight for linear in linears]), bias)


def _scale(norm: Any) -> tuple[Tensor, float]:
    """An RMSNorm's weight, as float32, and its epsilon."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or epsilon is None or getattr(norm, "bias", None) is not None:
        raise OtherStructure
    return weight.detach().float().contiguous(), float(epsilon)
