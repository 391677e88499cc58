"""Forwards with exact attention on CUDA: of a few numbers of rows, captured as CUDA graphs.

Models of the common structure run lean (`engine.model.cuda.lean_layers`), others as the stock forward.

A GPU library picks a kernel, and with it the order of summation, by the shapes that it is given. So forwards have few
shapes: a batch is padded to the next of a few sizes, and a larger one is run in slices. Only sizes that were found to
give a row the same bits are used (`engine.model.cuda_products`, `CudaForward.agreeing`); without such, always 64 rows.

One graph serves all requests, because their keys and values lie in one pool. Graphs differ in the rows, in the text
length that they can read (attention chunks, in powers of two) and in the layers whose features are requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.core.batch import BLOCK, Batch, Int, Segment
from engine.core.errors import first_line
from engine.kernels.attention.attention import Rule
from engine.model import cuda_products
from engine.model.cuda import triton_attention
from engine.model.cuda.graphs import Recorded, bucket
from engine.model.cuda.lean_layers import LeanLayers
from engine.model.cuda.triton_attention import DeviceRows, TritonAttention, grouped
from engine.model.decoder_layer import OtherStructure
from engine.model.kv_pool import KVCache, KVPool
from engine.model.stock import NoCache, Unsupported

_CAPTURED = 256  # rows: larger forwards, of prompts, take longer than their launches, and graphs of them much memory
_PROBES = 16  # rows compared between sizes
_LEAST_LISTED = 4096  # a tree seldom lists more ancestors, so their number is nearly always the same
_SCRATCH_BYTES = 512 << 20  # of a layer's attention: after long texts fewer rows go together


class _Slice(NamedTuple):
    """At most `rows` rows of a batch, padded to so many with copies of the last one, as tensors.

    tokens, positions: [rows]. sources: [rows] the row whose key and value this one stores; blocks, lanes: [rows]
    where. prefix_lens: [rows]; ancestor_ptr: [rows + 1]; ancestor_slots: [capacity]; see `engine.core.batch.Batch`.
    tables: [rows, blocks], a table for each row, so that the size depends only on the blocks; table_of: [rows] where it
    begins. firsts: [rows + 1] where each group of rows begins, which attention reads a text for.
    """

    tokens: Tensor
    positions: Tensor
    sources: Tensor
    blocks: Tensor
    lanes: Tensor
    prefix_lens: Tensor
    ancestor_ptr: Tensor
    ancestor_slots: Tensor
    tables: Tensor
    table_of: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, batch: Batch, first: int, end: int, size: int, together: int) -> tuple[_Slice, int]:
        """Rows `first` to `end` of the batch, padded to `size`, and the number of attention chunks that they need.
        together: most rows of a group.

        A padding row repeats the last row. It stores the last row's key and value again, so it changes nothing, and it
        sees only its text's first position, so it costs little.
        """
        sources = np.minimum(np.arange(size), end - first - 1)
        rows = first + sources
        begins = batch.ancestor_ptr[np.minimum(first + np.arange(size + 1), end)]
        ancestors = batch.ancestor_slots[begins[0] : begins[-1]]
        prefix_lens = batch.prefix_lens[rows]
        prefix_lens[end - first :] = 1
        reach = max(int(batch.prefix_lens[first:end].max()), 1 + int(ancestors.max(initial=0)))
        chunks = bucket(-(-reach // triton_attention.CHUNK))
        width = chunks * triton_attention.CHUNK // BLOCK
        # entries past the end of a request's own table are arbitrary: no row reads them
        places = np.minimum(batch.table_of[rows][:, None] + np.arange(width), len(batch.tables) - 1)
        indexes = batch.tokens[rows], batch.positions[rows], sources, *np.divmod(batch.slots[rows], BLOCK)
        tables = batch.tables[places], np.arange(0, size * width, width)
        seen = prefix_lens, begins - begins[0], _filled(ancestors), *tables, grouped(batch.table_of[rows], together)
        return cls(*map(_longs, indexes), *(torch.from_numpy(array.astype(np.int32)) for array in seen)), chunks

    @property
    def seen(self) -> DeviceRows:
        """What attention reads of it."""
        return DeviceRows(
            self.prefix_lens, self.ancestor_ptr, self.ancestor_slots, self.tables, self.table_of, self.firsts
        )


class CudaForward:
    """Runs batches through a stock model with our attention. sizes: numbers of rows that forwards may have, ascending.
    recorded: its forwards as CUDA graphs, by rows, attention chunks, ancestors and feature layers.
    """

    def __init__(self, model: Any, pool: KVPool, q_per_kv: int):
        self.model, self.pool = model, pool
        self._attention = TritonAttention(pool, q_per_kv)
        self._cache = NoCache(model.config.get_text_config().num_hidden_layers)
        self.rules: dict[int, Rule] = {}  # of each layer in the latest stock forward
        self.lean: LeanLayers | None = None
        self.sizes: tuple[int, ...] = (cuda_products.SLICE,)
        self.recorded: dict[tuple[int, int, int, tuple[int, ...]], Recorded] = {}
        self._slice: _Slice | None = None  # the one being run
        self._chunks = 0

    @classmethod
    def tried(cls, model: Any, pool: KVPool, q_per_kv: int) -> CudaForward:
        """A forward that has run once. Raises Unsupported if it does not run at all."""
        cache = KVCache(pool)
        cache.reserve(2)
        batch = Batch.of([Segment.of_text([0, 0], cache)])
        forward = cls(model, pool, q_per_kv)
        try:
            forward(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton, its compiler and the driver have errors of their own
            raise Unsupported(first_line(error)) from error
        cache.release()
        return forward

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """See `engine.model.forward.Forward`."""
        logits: list[Tensor] = []
        features: list[Tensor] = []
        first = 0
        while first < len(batch):
            size = self._size(batch, first)
            end = min(first + size, len(batch))
            found, *asked = self._forward(
                *_Slice.of(batch, first, end, size, self._attention.together), tuple(feature_layers)
            )
            chosen = batch.chosen[(batch.chosen >= first) & (batch.chosen < end)] - first
            # copies, because the next slice's results reuse these tensors
            logits.append(found.index_select(0, _longs(chosen).to(found.device)))
            features += [states[: end - first].clone() for states in asked]
            first = end
        return torch.cat(logits), torch.cat(features) if features else None

    def take_lean(self, context: int) -> bool:
        """Run the layers lean from now on, if the model has the common structure. context: positions served."""
        try:
            self.lean = LeanLayers(self.model, self.pool, self._attention.q_per_kv, self.rules, context)
        except (OtherStructure, AttributeError):  # a part of the structure is missing
            return False
        self.recorded.clear()
        return True

    def drop_lean(self) -> None:
        """Run the stock forward again."""
        self.lean = None
        self.recorded.clear()

    @property
    def linears(self) -> list[nn.Linear]:
        """All products of a forward."""
        if self.lean is not None:
            return self.lean.linears
        return [module for module in self.model.modules() if type(module) is nn.Linear]

    def attend(self, layer: int, rule: Rule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `engine.model.stock.Attends`."""
        shape, rows = self.pool.shape, self._slice
        self.rules[layer] = rule
        assert rows is not None
        if key.shape[1:] != (shape.kv_heads, len(rows.tokens), shape.head_dim) or value.shape != key.shape:
            raise Unsupported("its layers have keys or values of different shapes")
        if query.dtype != shape.dtype:
            raise Unsupported(f"its attention computes in {query.dtype}")
        self.pool.keys[layer][rows.blocks, :, : shape.head_dim, rows.lanes] = key[0].transpose(0, 1)[rows.sources]
        self.pool.values[layer][rows.blocks, :, rows.lanes, : shape.head_dim] = value[0].transpose(0, 1)[rows.sources]
        return self._attention(rows.seen, self._chunks, layer, rule, query[0].transpose(0, 1).contiguous())[None]

    @property
    def possible(self) -> tuple[int, ...]:
        """The sizes that a batch over this pool can need."""
        room, sizes = self.pool.blocks * BLOCK, cuda_products.SIZES
        return tuple(
            size for below, size in zip((0, *sizes), sizes, strict=False) if below < room or size == cuda_products.SLICE
        )

    def agreeing(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those of the sizes, SLICE among them, whose forwards give a text the logits that one of SLICE rows does, bit
        for bit, alone and after other rows. All of a forward depends on its rows: norms choose their kernels too.
        """
        text, before = KVCache(self.pool), KVCache(self.pool)
        vocabulary = self.model.config.get_text_config().vocab_size
        probe = [7 * i % vocabulary for i in range(min(_PROBES, *sizes))]
        text.reserve(len(probe))
        before.reserve(max(0, min(max(sizes) - len(probe), self.pool.free * BLOCK)))

        def logits(size: int, others: int) -> Tensor:
            self.sizes = (size,)
            rest = [Segment.of_text([1] * others, before, "none")] if others else []
            return self(Batch.of([*rest, Segment.of_text(probe, text, "all")]))[0]

        def agrees(size: int) -> bool:
            places = {0, min(size - len(probe), before.capacity)}
            return all(torch.equal(logits(size, others), expected) for others in places)

        usual, found = self.sizes, []
        expected = logits(cuda_products.SLICE, 0)
        try:
            found = [size for size in sizes if size == cuda_products.SLICE or agrees(size)]
        except torch.OutOfMemoryError:  # with the usual size there is enough
            found = [cuda_products.SLICE]
        self.sizes = usual
        text.release()
        before.release()
        return tuple(found)

    def _size(self, batch: Batch, first: int) -> int:
        """How many rows the forward over the batch's rows from `first` on has."""
        shape, rows = self.pool.shape, len(batch) - first
        reach = int(batch.prefix_lens[first:].max()) + len(batch)
        chunks = bucket(-(-reach // triton_attention.CHUNK))
        row_bytes = chunks * self._attention.q_per_kv * shape.kv_heads * shape.dims * 4
        fitting = [size for size in self.sizes if size * row_bytes <= _SCRATCH_BYTES] or self.sizes[:1]
        return next((size for size in fitting if size >= rows), fitting[-1])

    def _forward(self, rows: _Slice, chunks: int, feature_layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        """All logits, [rows, vocab], and [rows, layers, hidden] features if layers are given."""
        device, work = self.pool.keys.device, partial(self._run, chunks, feature_layers)
        size = len(rows.tokens)
        if size > _CAPTURED:
            return work(*(part.to(device) for part in rows))
        key = size, chunks, len(rows.ancestor_slots), feature_layers
        if key not in self.recorded:
            self.recorded[key] = Recorded(work, device)
        return self.recorded[key](*rows)

    def _run(self, chunks: int, feature_layers: tuple[int, ...], *rows: Tensor) -> tuple[Tensor, ...]:
        """A forward over tensors on the device: the part that a CUDA graph captures."""
        self._slice, self._chunks = _Slice(*rows), chunks
        if self.lean is not None:
            return self.lean(self._slice, self._slice.seen, chunks, self._attention, feature_layers)
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


def _filled(ancestors: Int) -> Int:
    """Padded with zeros."""
    ancestor_slots = np.zeros(max(_LEAST_LISTED, bucket(max(1, len(ancestors)))), np.int32)
    ancestor_slots[: len(ancestors)] = ancestors
    return ancestor_slots


def _longs(array: Int) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
