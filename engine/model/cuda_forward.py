"""The stock forward with exact attention on CUDA: always 64 rows, captured as CUDA graphs.

A GPU library picks a kernel, and with it the order of summation, by the shapes that it is given. So all forwards have
one shape: a batch is run in slices of 64 rows, and a slice with fewer rows is padded.

One graph serves all requests, because their keys and values lie in one pool. Graphs differ in the text length that they
can read (attention chunks, in powers of two) and in the layers whose features are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.batch import BLOCK, Batch, Int, Segment
from engine.errors import first_line
from engine.model import triton_attention
from engine.model.attention import Rule
from engine.model.kv_pool import KVCache, KVPool
from engine.model.stock import NoCache, Unsupported
from engine.model.triton_attention import Rows, TritonAttention
from engine.recorded import Recorded, bucket

ROWS = 64
"""Rows of every forward: all products, norms and sums then have one shape, and a row's bits cannot depend on how many
other rows there are. A GPU does 64 in about the time of one, which is the time to read the weights.
"""


class _Slice(NamedTuple):
    """At most ROWS rows of a batch, padded with copies of the last one, as tensors.

    tokens, positions: [ROWS]. sources: [ROWS] the row whose key and value this one stores; blocks, lanes: [ROWS]
    where. prefixes: [ROWS]; others: [ROWS + 1]; listed: [capacity]; see `engine.batch.Batch`. tables: [ROWS, blocks], a
    table for each row, so that the size depends only on the blocks; table_of: [ROWS] where it begins.
    """

    tokens: Tensor
    positions: Tensor
    sources: Tensor
    blocks: Tensor
    lanes: Tensor
    prefixes: Tensor
    others: Tensor
    listed: Tensor
    tables: Tensor
    table_of: Tensor

    @classmethod
    def of(cls, batch: Batch, first: int, end: int) -> tuple[_Slice, int]:
        """Rows `first` to `end` of the batch, and the number of attention chunks that they need.

        A padding row repeats the last row. It stores the last row's key and value again, so it changes nothing, and it
        sees only its text's first position, so it costs little.
        """
        sources = np.minimum(np.arange(ROWS), end - first - 1)
        rows = first + sources
        begins = batch.others[np.minimum(first + np.arange(ROWS + 1), end)]
        ancestors = batch.listed[begins[0] : begins[-1]]
        prefixes = batch.prefixes[rows]
        prefixes[end - first :] = 1
        reach = max(int(batch.prefixes[first:end].max()), 1 + int(ancestors.max(initial=0)))
        chunks = bucket(-(-reach // triton_attention.CHUNK))
        width = chunks * triton_attention.CHUNK // BLOCK
        # entries past the end of a request's own table are arbitrary: no row reads them
        places = np.minimum(batch.table_of[rows][:, None] + np.arange(width), len(batch.tables) - 1)
        indexes = batch.tokens[rows], batch.positions[rows], sources, *np.divmod(batch.slots[rows], BLOCK)
        seen = prefixes, begins - begins[0], _filled(ancestors), batch.tables[places], np.arange(0, ROWS * width, width)
        return cls(*map(_longs, indexes), *(torch.from_numpy(array.astype(np.int32)) for array in seen)), chunks


class CudaForward:
    """Runs batches through a stock model with our attention. recorded: its forwards as CUDA graphs, by attention
    chunks, ancestors and feature layers.
    """

    def __init__(self, model: Any, pool: KVPool, groups: int):
        self.model, self.pool = model, pool
        self._attention = TritonAttention(pool, groups)
        self._cache = NoCache(model.config.get_text_config().num_hidden_layers)
        self.recorded: dict[tuple[int, int, tuple[int, ...]], Recorded] = {}
        self._slice: _Slice | None = None  # the one being run
        self._chunks = 0

    @classmethod
    def tried(cls, model: Any, pool: KVPool, groups: int) -> CudaForward:
        """A forward that has run once. Raises Unsupported if it does not run at all."""
        cache = KVCache(pool)
        cache.reserve(2)
        batch = Batch.of([Segment.of_text([0, 0], cache)])
        forward = cls(model, pool, groups)
        try:
            forward(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton, its compiler and the driver have errors of their own
            raise Unsupported(first_line(error)) from error
        cache.release()
        return forward

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits of the chosen rows, [chosen, vocab], and features [rows, layers, hidden] if layers are given."""
        logits: list[Tensor] = []
        features: list[Tensor] = []
        for first in range(0, len(batch), ROWS):
            end = min(first + ROWS, len(batch))
            found, *asked = self._forward(*_Slice.of(batch, first, end), tuple(feature_layers))
            chosen = batch.chosen[(batch.chosen >= first) & (batch.chosen < end)] - first
            # copies, because the next slice's results reuse these tensors
            logits.append(found.index_select(0, _longs(chosen).to(found.device)))
            features += [states[: end - first].clone() for states in asked]
        return torch.cat(logits), torch.cat(features) if features else None

    def attend(self, layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `engine.model.stock.Attends`."""
        shape, rows = self.pool.shape, self._slice
        assert rows is not None
        if key.shape[1:] != (shape.kv_heads, ROWS, shape.head_dim) or value.shape != key.shape:
            raise Unsupported("its layers have keys or values of different shapes")
        if query.dtype != shape.dtype:
            raise Unsupported(f"its attention computes in {query.dtype}")
        self.pool.keys[layer][rows.blocks, :, : shape.head_dim, rows.lanes] = key[0].transpose(0, 1)[rows.sources]
        self.pool.values[layer][rows.blocks, :, rows.lanes, : shape.head_dim] = value[0].transpose(0, 1)[rows.sources]
        seen = Rows(rows.prefixes, rows.others, rows.listed, rows.tables, rows.table_of)
        return self._attention(seen, self._chunks, layer, rule, query[0].transpose(0, 1).contiguous())[None]

    def _forward(self, rows: _Slice, chunks: int, feature_layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        """All logits, [ROWS, vocab], and [ROWS, layers, hidden] features if layers are given."""
        device, work = self.pool.keys.device, partial(self._run, chunks, feature_layers)
        key = chunks, len(rows.listed), feature_layers
        if key not in self.recorded:
            self.recorded[key] = Recorded(work, device)
        return self.recorded[key](*rows)

    def _run(self, chunks: int, feature_layers: tuple[int, ...], *rows: Tensor) -> tuple[Tensor, ...]:
        """A forward over tensors on the device: the part that a CUDA graph captures."""
        self._slice, self._chunks = _Slice(*rows), chunks
        out = self.model(
            input_ids=self._slice.tokens[None],
            position_ids=self._slice.positions[None],
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=bool(feature_layers),
            exact=self,
        )
        if not feature_layers:
            return (out.logits[0],)
        return out.logits[0], torch.stack([out.hidden_states[layer][0] for layer in feature_layers], dim=1)


def exact_products(model: Any) -> bool:
    """Whether each linear layer, given ROWS rows, gives a row the same bits at any place among them."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    one_of_each = {(*module.weight.shape, module.weight.dtype, module.bias is None): module for module in linears}
    return all(_same_everywhere(linear) for linear in one_of_each.values())


def _same_everywhere(linear: nn.Linear) -> bool:
    """Compares a few rows padded with zeros to the same rows in every place among each other."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS // 4, linear.in_features, generator=generator).to(linear.weight)
    expected = linear(torch.cat([x, x.new_zeros(ROWS - len(x), linear.in_features)])[None])[0, : len(x)]
    orders = ((torch.arange(ROWS, device=x.device) + shift) % len(x) for shift in range(len(x)))
    return all(torch.equal(linear(x[order][None])[0], expected[order]) for order in orders)


def _filled(ancestors: Int) -> Int:
    """Padded with zeros: trees seldom need more than ROWS for each row, so the length is nearly always the same."""
    listed = np.zeros(max(ROWS * ROWS, bucket(max(1, len(ancestors)))), np.int32)
    listed[: len(ancestors)] = ancestors
    return listed


def _longs(array: Int) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
