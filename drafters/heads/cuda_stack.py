"""A head's decoder layers on CUDA, for all requests at once, with the attention and kernels of a target's lean layers.

What `drafters.heads.stack` says holds here too: rows are flat, keys and values of all requests lie in one pool of
blocks, and a row lists the slots of its ancestors. So one graph serves the steps of all requests and texts: it differs
in the number of rows alone. A step reads and writes what a head keeps of its rows within the graph, and takes nothing
from the host but the rows' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from drafters.heads.growth.ahead import Keep, draft_ahead, draft_behind
from drafters.heads.growth.behind import DraftsBehind
from drafters.heads.growth.policies import Policy
from drafters.heads.growth.trie import Trie
from drafters.heads.layers import DecoderLayer, Linear, RMSNorm
from drafters.heads.stack import GrowingPool, StackLayer, StackSpec, norm_of
from engine.core.batch import BLOCK_SIZE, Batch, Int, Rows
from engine.core.drafter_protocol import DeviceVerdicts
from engine.device import uploaded
from engine.kernels.attention.attention import Rule
from engine.kernels.layer.weights import Norm
from engine.model.cuda.graphs import CaptureOwner, Recorded
from engine.model.cuda.layer_kernels import entered, gated, normed
from engine.model.cuda.padded_rows import PaddedRows, longs
from engine.model.cuda.triton_attention import TritonAttention

SIZES = (4, 16, 64, 256, 512)
"""Rows of a graph. More, of prompts, are launched kernel by kernel."""
_BLOCKS = 1024  # blocks of the pool at least: when it grows, graphs are captured anew
_POOL_SHARE = 16  # the pool takes one part in so many of free memory
_POSITIONS = 1 << 17  # positions that are rotated without computing more, for which graphs are captured anew
_LISTED = 1 << 16  # blocks and ancestors that the rows of a graph may list


def padded_size(rows: int) -> int:
    """Return the rows of the graph that serves so many, or as many if none does."""
    return next((size for size in SIZES if size >= rows), rows)


def first_blocks(block_bytes: int, device: torch.device) -> int:
    """Return the blocks of a pool that is not to grow while requests are served."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return max(_BLOCKS, free // _POOL_SHARE // block_bytes)


class _Layer(NamedTuple):
    """A layer's weights as the kernels take them. norms: [2, head_dim] float32, of queries and keys."""

    of: StackLayer
    input_norm: Norm | None
    inner_norm: Norm
    norms: Tensor | None
    epsilon: float

    @classmethod
    def over(cls, layer: StackLayer) -> _Layer:
        decoder = layer.decoder
        inner = norm_of(decoder.norm)
        assert inner is not None
        return cls(layer, norm_of(layer.input_norm), inner, *norms_of(decoder))


def norms_of(decoder: DecoderLayer) -> tuple[Tensor | None, float]:
    """Return the weights of the norms of each head's query and key, [2, head_dim] float32, and their epsilon."""
    query, key = norm_of(decoder.query_norm), norm_of(decoder.key_norm)
    if query is None or key is None:
        return None, 0.0
    return torch.stack([query.weight, key.weight]), query.epsilon


class CudaStack:
    """Computes on a GPU what `drafters.heads.stack.Stack` computes on a CPU; the parameters are described there."""

    def __init__(self, spec: StackSpec):
        self.spec, self.dtype = spec, spec.dtype
        self._layers, self._norm = [_Layer.over(layer) for layer in spec.own_layers], norm_of(spec.norm)
        first = self.first = spec.first
        self.hidden = first.out.outputs
        shape = spec.kv_shape()
        blocks = first_blocks(shape.block_bytes + BLOCK_SIZE * self.hidden * spec.dtype.itemsize, first.device)
        self.pool = GrowingPool(shape, blocks, self.hidden, spec.dtype, first.device)
        self._attention = TritonAttention(self.pool, first.heads // first.kv_heads, SIZES[-1])
        self._rule = Rule(first.head_dim**-0.5)
        self._recorded: dict[tuple[int, bool], Recorded] = {}  # by rows, and whether the device alone knows them
        self._over = self.pool.keys  # what the graphs were captured over
        self.owner = CaptureOwner()
        self.cos_sin = self.first.rotary.halves(_POSITIONS)

    def draft_ahead(self, tries: Sequence[Trie], roots: Sequence[Tensor], policy: Policy) -> None:
        """See `drafters.heads.growth.ahead`."""
        draft_ahead(self, tries, roots, policy)

    def draft_behind(self, keep: Keep, tries: Sequence[Trie], verdicts: DeviceVerdicts, policy: Policy) -> DraftsBehind:
        """See `drafters.heads.growth.ahead`."""
        return draft_behind(self, keep, tries, verdicts, policy)

    def reader(self, fc: Linear, norm: RMSNorm, layers: Sequence[tuple[DecoderLayer, Linear]]) -> CudaReader:
        """Reads what such layers attend to beside their rows into the pool."""
        return CudaReader(self, fc, norm, layers)

    def reserve_positions(self, positions: int) -> None:
        """Compute the cosines and sines of `positions` positions: [positions, head_dim] float32."""
        if positions > len(self.cos_sin):
            self.cos_sin = self.first.rotary.halves(2 * positions)
            self._recorded.clear()

    def run(self, above: Sequence[int], parts: Sequence[Rows], chosen: Sequence[int] | None) -> Tensor:
        """See `Stack.run`."""
        step = self.step(parts)
        read = np.full(step.size, above[-1])
        read[: step.count] = above
        picked = np.asarray(range(step.count) if chosen is None else chosen)
        return step.launch(longs(read), step.rows, picked)[: len(picked)].clone()  # the next call overwrites it

    def step(self, parts: Sequence[Rows]) -> CudaStep:
        """Prepare a forward over these rows; there is room for them from now on."""
        for part in parts:
            part.cache.reserve(part.first + len(part))
        batch = Batch(parts)
        self.reserve_positions(batch.reach)
        if self._over is not self.pool.keys:
            self._recorded.clear()
            self._over = self.pool.keys
        size = padded_size(len(batch))
        rows = PaddedRows.of(batch, 0, len(batch), size, self._attention)
        if (chunks := int(rows.parts[-1])) > self._attention.capacity:
            self._attention.reserve(2 * chunks)
            self._recorded.clear()
        return CudaStep(self, batch, rows)

    def launch(self, size: int, late: bool, *given: Tensor) -> Tensor:
        """Return what `_run` makes of these, or `_run_late`; the next call overwrites it."""
        work = self._run_late if late else self._run
        if size not in SIZES or len(given[-1]) > _LISTED:
            return work(*uploaded(given, self.first.device))[0]
        if (size, late) not in self._recorded:
            self._recorded[size, late] = Recorded(work, self.first.device, owner=self.owner, room=_LISTED)
            # what is captured runs several times, and rows that read their own places replace what is there
            chosen, entered, written, *rows = given
            self._recorded[size, late](chosen, entered, torch.full_like(written, self.nowhere), *rows)
        return self._recorded[size, late](*given)[0]

    @property
    def nowhere(self) -> int:
        """Where rows that pad a forward leave what is kept."""
        return self.pool.blocks * BLOCK_SIZE

    def _run_late(self, chosen: Tensor, given: Tensor, written: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Run with what the device alone knows of the rows in the place of their own; given: see `NextLayer.rows`."""
        tokens, read, positions, prefixes = given.unbind()
        seen = PaddedRows(*rows)._replace(tokens=tokens, positions=positions, prefix_lens=prefixes.int())
        return self._run(chosen, read, written, *seen)

    def _run(self, chosen: Tensor, read: Tensor, written: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return the head's outputs of the chosen rows: the part that a CUDA graph captures. read, written: [rows],
        where each row finds and leaves what is kept.
        """
        spec, padded, features = self.spec, PaddedRows(*rows), self.pool.features
        begun = spec.enters(features.index_select(0, read), padded.tokens)
        residual = (begun if spec.entry is None else spec.entry(begun)).float()
        delta = x = residual.to(self.dtype)
        for index, layer in enumerate(self._layers):
            if layer.input_norm is not None:
                x = normed(residual, delta, layer.input_norm, added=index > 0)
            qkv = layer.of.qkv(x)
            if index == 0 and spec.of_token is not None:
                qkv += spec.of_token.index_select(0, padded.tokens)
            query = entered(self.pool, index, qkv, padded, self.cos_sin, layer.norms, layer.epsilon)
            attended = self._attention(padded.seen, index, self._rule, query)
            x = normed(residual, layer.of.decoder.out(attended.flatten(1)), layer.inner_norm)
            delta = layer.of.decoder.down(gated(F.linear(x, layer.of.decoder.gate_up.weight)))
        x = residual.add_(delta).to(self.dtype) if self._norm is None else normed(residual, delta, self._norm)
        if spec.keeps:
            features.index_copy_(0, written, residual.to(features.dtype))
        return (spec.head(x.index_select(0, chosen)),)


class CudaStep:
    """A forward over rows of a batch, on its way. size: with those that pad it."""

    def __init__(self, stack: CudaStack, batch: Batch, rows: PaddedRows):
        self.stack, self.batch, self.rows = stack, batch, rows
        self.count, self.size = len(batch), len(rows.tokens)

    def launch(self, given: Tensor, rows: PaddedRows, picked: NDArray[np.int64], late: bool = False) -> Tensor:
        """Return the head's outputs of the rows picked, and others behind them; the next call overwrites them. given:
        where the rows find what they enter with, [size], or what the device alone knows of them.
        """
        written = np.full(self.size, self.stack.nowhere)
        written[: self.count] = self.batch.slots
        filled = np.zeros(self.size if self.size in SIZES else len(picked), np.int64)
        filled[: len(picked)] = picked
        return self.stack.launch(self.size, late, longs(filled), given, longs(written), *rows)

    def run(self, given: Tensor, listed: Tensor, picked: Tensor | None = None) -> Tensor:
        """See `drafters.heads.growth.ahead.HeadStep`."""
        out = self.launch(given, self.rows._replace(listed=listed), np.arange(self.count), late=True)
        return out[: self.count].clone() if picked is None else out.index_select(0, picked)

    @property
    def given(self) -> Tensor:
        """What `run` takes of rows that read their own places, [4, size] int64, on the host."""
        read = F.pad(self.places, (0, self.size - self.count))
        return torch.stack([self.rows.tokens, read, self.rows.positions, self.rows.prefix_lens.long()])

    @property
    def tables(self) -> Tensor:
        """The requests' block tables."""
        return self.rows.listed[: int(self.rows.ancestor_ptr[0])]

    @property
    def places(self) -> Tensor:
        """[count] int64: where in the pool the rows' features are."""
        return longs(self.batch.slots)


class CudaReader:
    """Reads the context of a one-pass head, as `drafters.heads.one_pass.context.ContextReader` does."""

    def __init__(self, stack: CudaStack, fc: Linear, norm: RMSNorm, layers: Sequence[tuple[DecoderLayer, Linear]]):
        of_context = norm_of(norm)
        assert of_context is not None
        self.stack, self.fc, self.norm = stack, fc, of_context
        self.layers = [(kv, *norms_of(decoder)) for decoder, kv in layers]
        self._recorded: dict[tuple[int, str], Recorded] = {}  # by rows, and where the features come from
        self._over: tuple[Tensor, Tensor] | None = None

    def read(self, features: Tensor, positions: Sequence[int], places: Int) -> None:
        stack, count = self.stack, len(features)
        stack.reserve_positions(max(positions) + 1)
        over = stack.pool.keys, stack.cos_sin
        if self._over is None or any(a is not b for a, b in zip(self._over, over, strict=True)):
            self._recorded.clear()
            self._over = over
        for first in range(0, count, SIZES[-1]):
            some = features[first : first + SIZES[-1]]
            size = padded_size(len(some))
            sources = np.minimum(np.arange(size), len(some) - 1)
            rows = first + sources
            written = np.full(size, stack.nowhere)
            written[: len(some)] = places[rows[: len(some)]]
            indexes = written, np.asarray(positions)[rows], sources, *np.divmod(places[rows], BLOCK_SIZE)
            if (key := (size, some.device.type)) not in self._recorded:
                self._recorded[key] = Recorded(self._run, stack.first.device, owner=stack.owner)
            filled = F.pad(some.to(stack.dtype), (0, 0, 0, size - len(some)))
            self._recorded[key](filled, *map(longs, indexes))

    def _run(self, features: Tensor, written: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        """Run the part that a CUDA graph captures."""
        stack, rows = self.stack, _Places(*places)
        fused = self.fc(features)
        context = normed(fused.float(), fused, self.norm, added=False)
        for index, (kv, norms, epsilon) in enumerate(self.layers):
            entered(stack.pool, index, kv(context), rows, stack.cos_sin, norms, epsilon)
        stack.pool.features.index_copy_(0, written, context)
        return (context,)


class _Places(NamedTuple):
    """See `engine.model.cuda.padded_rows.Places`."""

    positions: Tensor
    sources: Tensor
    blocks: Tensor
    lanes: Tensor
