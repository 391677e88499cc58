"""Forwards with exact attention on CUDA: of a few numbers of rows, captured as CUDA graphs.

Models of the common structure run lean (`engine.model.cuda.lean_layers`), others as the stock forward. Those of whose
layers some are gated delta nets run lean alone.

A GPU library picks a kernel, and with it the order of summation, by the shapes that it is given. So forwards have few
shapes: a batch is padded to the next of a few sizes, and a larger one is run in slices. Only sizes that were found to
give a row the same bits are used (`engine.model.cuda_products`, `CudaForward.agreeing`); without such, always 64 rows.

One graph serves all requests and texts of every length, because their keys and values lie in one pool. Graphs differ in
the number of rows and in the layers whose features are requested, so all of them are captured before requests come.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.errors import StateLost, first_line
from engine.device import uploaded
from engine.kernels.attention.attention import Rule
from engine.kernels.state.walk import StateRows
from engine.model import cuda_products
from engine.model.cuda.device_walk import fitting_end, slice_of, walk_tensor
from engine.model.cuda.graphs import CaptureOwner, Recorded, shared_memory
from engine.model.cuda.lean_layers import LeanLayers
from engine.model.cuda.padded_rows import PaddedRows, longs, table_ends
from engine.model.cuda.triton_attention import TritonAttention
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.stock import NoCache, Unsupported, attending
from engine.model.structure import OtherStructure

_PROBES = 16  # rows compared between sizes
_ROW_TENSORS = len(PaddedRows._fields)
_LISTED = 1 << 18  # blocks and ancestors that a forward's rows may list: of more rows, some go together


class CudaForward:
    """Runs batches through a stock model with our attention. sizes: numbers of rows that forwards may have, ascending.
    recorded: its forwards as CUDA graphs, by rows and feature layers.
    """

    def __init__(self, model: Any, pool: KVPool, q_per_kv: int):
        self.model, self.pool = model, pool
        self.attention = TritonAttention(pool, q_per_kv, cuda_products.SIZES[-1])
        self._cache = NoCache(model.config.get_text_config().num_hidden_layers)
        self.rules: dict[int, Rule] = {}  # of each layer in the latest stock forward
        self.lean: LeanLayers | None = None
        self.sizes: tuple[int, ...] = (cuda_products.SLICE,)
        self.recorded: dict[tuple[int, tuple[int, ...]], Recorded] = {}
        self._memory, self._owner = shared_memory(pool.keys.device), CaptureOwner()
        self._slice: PaddedRows | None = None  # the one being run
        self._store: Tensor | None = None  # the kept rows that the captured forwards read

    @classmethod
    def tried(cls, model: Any, pool: KVPool, q_per_kv: int) -> CudaForward:
        """Make a forward that has run once. Raises Unsupported if it does not run at all."""
        forward = cls(model, pool, q_per_kv)
        forward._try_once()
        return forward

    @classmethod
    def lean_alone(cls, model: Any, pool: KVPool, q_per_kv: int, rules: dict[int, Rule], context: int) -> CudaForward:
        """Make a forward of a model that lean layers alone can run, once it has run. rules: of the layers that attend.
        context: positions served. Raises OtherStructure, or AttributeError if a part is missing, for another model, and
        Unsupported if it does not run.
        """
        forward = cls(model, pool, q_per_kv)
        forward.lean = LeanLayers(model, pool, q_per_kv, rules, context)
        forward._try_once()
        return forward

    def _try_once(self) -> None:
        cache = KVCache(self.pool)
        cache.reserve(2)
        batch = Batch.of([Segment.of_text([0, 0], cache)])
        try:
            self.attention.choose_products()
            self(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton, its compiler and the driver have errors of their own
            raise Unsupported(first_line(error)) from error
        cache.release()

    def __call__(
        self, batch: Batch, feature_layers: Sequence[int] = (), tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `engine.model.forward.Forward`. tokens: the rows' tokens, [rows] int32, where they are on the device
        alone. Raises StateLost if a forward over layers with a state is interrupted; nothing is lost before it runs.
        """
        if self.pool.layer_states is None:
            return self._run_slices(batch, feature_layers, [], tokens)
        requests = [segment.cache.state for segment in batch.segments]
        walked = [state.rows(segment) for state, segment in zip(requests, batch.segments, strict=True)]
        if self._store is not self.pool.layer_states.store:  # it has grown
            self.recorded.clear()
            self._store = self.pool.layer_states.store
        try:
            found = self._run_slices(batch, feature_layers, walked)
        except Exception as error:  # some layers may have replayed rows and others not
            raise StateLost(f"a forward over layers with a state was interrupted: {first_line(error)}") from error
        for state in requests:
            state.end()
        return found

    def _run_slices(
        self, batch: Batch, feature_layers: Sequence[int], walked: Sequence[StateRows], tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the batch in forwards of few shapes. walked: of each request, if layers have a state."""
        logits: list[Tensor] = []
        features: list[Tensor] = []
        first = 0
        while first < len(batch):
            end, size = self._slice_of(batch, first, walked)
            rows = PaddedRows.of(batch, first, end, size, self.attention)
            walk = walk_tensor(slice_of(walked, batch.spans, first, end), size) if walked else None
            late = None if tokens is None else tokens[first:end].clamp(min=0)
            found, *asked = self._forward(rows, tuple(feature_layers), walk, late)
            chosen = batch.chosen[(batch.chosen >= first) & (batch.chosen < end)] - first
            # copies, because the next slice's results reuse these tensors
            logits.append(found.index_select(0, *uploaded([longs(chosen)], found.device)))
            features += [states[: end - first].clone() for states in asked]
            first = end
        return torch.cat(logits), torch.cat(features) if features else None

    def capture(self, feature_layers: Sequence[int], context: int) -> None:
        """Capture all graphs, so that no request waits for one. context: positions served."""
        text, room = KVCache(self.pool), min(context, self.pool.free * BLOCK_SIZE)
        for size in [size for size in self.sizes if size <= room]:
            text.reserve(size)
            self(Batch.of([Segment.of_text([0] * size, text, "all")]), feature_layers)
        text.release()

    def take_lean(self, context: int) -> bool:
        """Run the layers lean from now on, if the model has the common structure. context: positions served."""
        try:
            self.lean = LeanLayers(self.model, self.pool, self.attention.q_per_kv, self.rules, context)
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
        return self.attention(rows.seen, layer, rule, query[0].transpose(0, 1).contiguous())[None]

    @property
    def possible(self) -> tuple[int, ...]:
        """The sizes that a batch over this pool can need."""
        room, sizes = self.pool.blocks * BLOCK_SIZE, cuda_products.SIZES
        return tuple(
            size for below, size in zip((0, *sizes), sizes, strict=False) if below < room or size == cuda_products.SLICE
        )

    def agreeing(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the forward sizes (always including SLICE) whose forwards give a text the logits that one of SLICE
        rows does, bit for bit, alone and after other rows. All of a forward depends on its rows: norms choose their
        kernels too.
        """
        text, before = KVCache(self.pool), KVCache(self.pool)
        vocabulary = self.model.config.get_text_config().vocab_size
        probe = [7 * i % vocabulary for i in range(min(_PROBES, *sizes))]
        text.reserve(len(probe))
        before.reserve(max(0, min(max(sizes) - len(probe), self.pool.free * BLOCK_SIZE)))

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
        except (torch.OutOfMemoryError, StateLost):  # with the usual size there is enough memory
            found = [cuda_products.SLICE]
        self.sizes = usual
        text.release()
        before.release()
        return tuple(found)

    def _slice_of(self, batch: Batch, first: int, walked: Sequence[StateRows] = ()) -> tuple[int, int]:
        """Return where the next forward over the batch's rows from `first` on ends, and how many rows it has: as many
        as the largest size holds, and attention and walks over states have room for.
        """
        end = min(first + self.sizes[-1], len(batch))
        begins = batch.ancestor_ptr[first : end + 1]
        chunks = np.cumsum(self.attention.chunks_of(batch.prefix_lens[first:end], np.diff(begins)))
        listed = table_ends(batch)[first:end] - batch.table_of[first] + begins[1:] - begins[0]
        fitting = int(min(np.searchsorted(chunks, self.attention.capacity, "right"), np.searchsorted(listed, _LISTED)))
        end = fitting_end(walked, batch.spans, first, min(end, first + max(1, fitting)))
        return end, next(size for size in self.sizes if size >= end - first)

    def _forward(
        self, rows: PaddedRows, feature_layers: tuple[int, ...], walk: Tensor | None, late: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return all logits, [rows, vocab], and [rows, layers, hidden] features if layers are given. late: tokens that
        take the place of the rows' own.
        """
        key = len(rows.tokens), feature_layers
        if key not in self.recorded:
            work, device = partial(self._run, feature_layers), self.pool.keys.device
            self.recorded[key] = Recorded(work, device, self._memory, self._owner, _LISTED)
            if walk is not None:  # what is captured runs several times, and a state is replayed in place once
                self.recorded[key](torch.zeros_like(walk), *rows)
        return self.recorded[key](*rows, late=late) if walk is None else self.recorded[key](walk, *rows)

    def _run(self, feature_layers: tuple[int, ...], *rows: Tensor) -> tuple[Tensor, ...]:
        """Run a forward over tensors on the device: the part that a CUDA graph captures."""
        walk, self._slice = rows[:-_ROW_TENSORS], PaddedRows(*rows[-_ROW_TENSORS:])
        if self.lean is not None:
            return self.lean(self._slice, self.attention, feature_layers, *walk)
        with attending(self):
            out = self.model(
                input_ids=self._slice.tokens[None],
                position_ids=self._slice.positions[None],
                past_key_values=self._cache,
                use_cache=True,
                output_hidden_states=bool(feature_layers),
            )
        if not feature_layers:
            return (out.logits[0],)
        return out.logits[0], torch.stack([out.hidden_states[layer][0] for layer in feature_layers], dim=1)
