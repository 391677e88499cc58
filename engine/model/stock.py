"""The stock forward of a `transformers` model, with exact attention through its own `AttentionInterface`.

No model family's code is copied or patched. A layer's scale, window, soft cap and sinks are what its own code passes to
the attention function; a window comes from the mask that the model asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Attention, Rule, has_pairs
from engine.kernels.attention.kv_slots import STORE, store_kernel
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool

NAME = "talon"
"""The name of our attention for `attn_implementation`."""


class Unsupported(Exception):
    """The model asks for something that exact attention does not do."""


class Attends(Protocol):
    """A forward, as its attention layers see it."""

    def attend(self, layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [1, rows, heads, head_dim]. query: [1, heads, rows, head_dim]; key, value: [1, kv_heads, rows,
        head_dim].
        """
        ...


_under_way: ContextVar[Attends | None] = ContextVar("under_way", default=None)


@contextmanager
def attending(forward: Attends) -> Iterator[None]:
    """Let attention layers call `forward` within this context. Some families do not pass options on to their layers."""
    token = _under_way.set(forward)
    try:
        yield
    finally:
        _under_way.reset(token)


class StockForward:
    """Runs batches through a stock model. rules: the attention rule of each layer in the latest forward."""

    sizes = (1,)

    def __init__(self, model: Any, pool: KVPool, q_per_kv: int):
        self.model, self.pool = model, pool
        self.attention = Attention(pool, q_per_kv)
        self.rules: dict[int, Rule] = {}
        self._cache = NoCache(model.config.get_text_config().num_hidden_layers)
        self._entry = _Entry(self.attention)

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """See `engine.model.forward.Forward`."""
        self._entry.begin(batch)
        with attending(self):
            out = self.model(
                input_ids=torch.from_numpy(batch.tokens.astype(np.int64))[None],
                position_ids=torch.from_numpy(batch.positions.astype(np.int64))[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.from_numpy(batch.chosen.astype(np.int64)),
                output_hidden_states=bool(feature_layers),
            )
        if not feature_layers:
            return out.logits[0], None
        return out.logits[0], torch.stack([out.hidden_states[layer][0] for layer in feature_layers], dim=1)

    def attend(self, layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attends`."""
        self.rules[layer] = rule
        return self._entry(layer, rule, query, key, value)


class _Entry:
    """Writes a stock layer's keys and values to the pool, and attends."""

    def __init__(self, attention: Attention):
        self.attention = attention
        self._work = np.zeros(1, STORE)
        self._scratch = torch.zeros(0, dtype=torch.float32)
        self._slots = np.zeros(0, np.int32)
        shape, record = attention.pool.shape, self._work[0]
        record["kv_heads"], record["q_per_kv"], record["head_dim"] = shape.kv_heads, attention.q_per_kv, shape.head_dim
        record["dims"], record["width"], record["vnni"] = shape.dims, shape.dtype.itemsize, shape.vnni

    def begin(self, batch: Batch) -> None:
        self.attention.begin(batch)
        self._slots = batch.slots
        if self._scratch.numel() < (needed := torch.get_num_threads() * self.attention.pool.shape.dims):
            self._scratch = torch.zeros(needed, dtype=torch.float32)
        record = self._work[0]
        record["slots"], record["rows"] = self._slots.ctypes.data, len(batch)
        record["queries"], record["scratch"] = self.attention.queries.data_ptr(), self._scratch.data_ptr()

    def __call__(self, layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape, rows = self.attention.pool.shape, query.shape[2]
        if key.shape[1:] != (shape.kv_heads, rows, shape.head_dim) or value.shape != key.shape:
            raise Unsupported("its layers have keys or values of different shapes")
        if query.dtype != shape.dtype:
            raise Unsupported(f"its attention computes in {query.dtype}")
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        record = self._work[0]
        record["query"], record["key"], record["value"] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        record["keys"], record["values"] = self.attention.pool.addresses(layer)
        store_kernel()(self._work.ctypes.data, rows)
        out = torch.empty_like(q)
        self.attention.attend(layer, rule, out)
        return out[None]


def _attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend when `transformers` calls. Outside `attending`, as in `generate`, keys and values are a whole text's, in
    order.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("indexer_mask") is not None:
        raise Unsupported("its attention adds a bias")
    rule = Rule(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_window(attention_mask),
        softcap=float(softcap or 0.0),
        sinks=None if s_aux is None else s_aux.float().contiguous(),
    )
    if (forward := _under_way.get()) is not None:
        return forward.attend(module.layer_idx, rule, query, key, value), None
    if query.device.type != "cpu":
        raise Unsupported(f"no forward of ours is under way, which attention on {query.device.type} needs")
    return torch.cat([_whole_text(rule, *one) for one in zip(query, key, value, strict=True)]), None


def _whole_text(rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with a text's last rows to all of it, in a pool of its own. query: [heads, rows, head_dim]."""
    heads, rows, head_dim = query.shape
    kv_heads, length, _ = key.shape
    pool = KVPool(KVShape(1, kv_heads, head_dim, query.dtype, has_pairs(query.dtype)), -(-length // BLOCK_SIZE))
    attention = Attention(pool, heads // kv_heads)
    cache, entry = KVCache(pool), _Entry(attention)
    cache.reserve(length)
    entry.begin(Batch.of([Segment.of_text([0] * length, cache)]))
    whole = torch.zeros(heads, length, head_dim, dtype=query.dtype)
    whole[:, length - rows :] = query
    return entry(0, rule, whole[None], key[None], value[None])[:, length - rows :]


def _window_marker(
    batch_size: int, q_length: int, kv_length: int, *args: Any, local_size: int | None = None, **kwargs: Any
) -> Tensor:
    """Return the window that the model asked for, 0 for none, in place of a mask: [1, 1, 1, 1] int64."""
    padding = kwargs.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        raise Unsupported("padding")
    return torch.full((1, 1, 1, 1), local_size or 0)


def _window(marker: Tensor | None) -> int:
    if marker is None:
        return 0
    if marker.dtype != torch.int64 or marker.numel() != 1:
        raise Unsupported("it masks more than a window")
    return int(marker)


class NoCache(Cache):
    """A stand-in for the model's cache; keys and values go to the pool."""

    def __init__(self, layers: int):
        super().__init__(layers=[_NoCacheLayer() for _ in range(layers)])


class _NoCacheLayer(CacheLayerMixin):
    is_croppable = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer holds nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, _window_marker)
