"""A head's decoder layers and its output matrix as one program on a CPU: all products, norms and attention of a forward
in one call.

Rows are flat and belong to any requests; keys and values of all requests lie in one pool of blocks. A row sees the
first `prefix` slots of its request and a list of others, so a tree needs no mask
(`engine.kernels.attention.attention`), and no row's result depends on the other rows. The residual stream and the
features are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numba import carray
from torch import Tensor

from drafters.heads.layers import DecoderLayer, Linear, RMSNorm
from engine.core.batch import BLOCK_SIZE, Batch, Int, Rows
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Attention, LayerKeys, Rule, has_pairs
from engine.kernels.gemm.matmul import Matmul
from engine.kernels.layer.decoder_steps import attention_and_mlp
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.weights import AttentionWeights, GatedMlp, LayerWeights, Norm
from engine.kernels.simd import BFLOAT16, FLOAT32, LANES, add, int_at, load, store
from engine.kernels.threads import address_of, kernel, num_threads, thread_id
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool

_CPU = torch.device("cpu")
_BLOCKS = 256  # of the pool initially; it grows

ADD_TOKENS = np.dtype([(name, "i8") for name in ("table", "tokens", "out", "rows", "columns", "width")])


@kernel(ADD_TOKENS)
def add_tokens_kernel(address: Any) -> None:
    """Compute out [rows, columns] += table[tokens]. tokens: [rows] int32."""
    work = carray(address, 1)[0]
    for row in range(thread_id(), work.rows, num_threads()):
        source = work.table + int_at(work.tokens + 4 * row) * work.columns * work.width
        out = work.out + row * work.columns * work.width
        for at in range(0, work.columns * work.width, LANES * work.width):
            if work.width == BFLOAT16:
                store(add(load(out + at, BFLOAT16), load(source + at, BFLOAT16)), out + at, BFLOAT16)
            else:
                store(add(load(out + at, FLOAT32), load(source + at, FLOAT32)), out + at, FLOAT32)


class RunsRows(Protocol):
    """A product, and how wide its rows are."""

    inputs: int
    outputs: int
    matmul: Matmul | None
    rounds: bool

    def __call__(self, x: Tensor) -> Tensor: ...


class ProgramLayer(Protocol):
    """A decoder layer as a stack takes it. heads: of queries, of keys, and the dimensions of one. rotation: cosines and
    sines of so many positions, [positions, rotated] float32.
    """

    @property
    def qkv(self) -> RunsRows: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> tuple[int, int, int]: ...
    @property
    def weights(self) -> LayerWeights: ...
    def rotation(self, positions: int) -> Tensor: ...


@dataclass(frozen=True)
class StackLayer:
    """A layer of a stack. input_norm: None where the first product multiplies the residual itself."""

    qkv: Linear
    decoder: DecoderLayer
    input_norm: RMSNorm | None

    @property
    def hidden(self) -> int:
        return self.decoder.out.outputs

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return the heads of queries and of keys, and the dimensions of one."""
        return self.decoder.heads, self.decoder.kv_heads, self.decoder.head_dim

    def rotation(self, positions: int) -> Tensor:
        """Return [positions, rotated] float32: cosines, then sines."""
        return self.decoder.rotary.halves(positions)

    @property
    def attention(self) -> AttentionWeights:
        """The attention, as a program takes it."""
        decoder = self.decoder
        norms = norm_of(decoder.query_norm), norm_of(decoder.key_norm)
        return AttentionWeights(self.qkv, decoder.out, *norms, decoder.head_dim)

    @property
    def weights(self) -> LayerWeights:
        """As a program takes them."""
        decoder = self.decoder
        return LayerWeights(
            mixer=self.attention,
            mlp=GatedMlp(decoder.gate_up, decoder.down, decoder.gate_up.outputs, gated=True),
            input_norm=norm_of(self.input_norm),
            inner_norm=norm_of(decoder.norm),
        )


def norm_of(norm: RMSNorm | Norm | None) -> Norm | None:
    """Return a head's norm, as a program takes it."""
    return norm if not isinstance(norm, RMSNorm) else Norm(norm.weight.float().contiguous(), float(norm.eps))


class PooledCache(KVCache):
    """One request's keys and values in the pool of a stack."""

    def places(self, first: int, count: int) -> Int:
        """Return [count]: places in the pool of the slots from `first` on."""
        self.reserve(first + count)
        return self.slots(np.arange(first, first + count, dtype=np.int32))


class Around(Protocol):
    """Steps around the parts of a layer. fits: whether a program has them."""

    @property
    def fits(self) -> bool: ...
    def enter(self, program: LayerProgram) -> None:
        """Add what comes before the layer's queries, keys and values are made of x."""

    def build(self, program: LayerProgram, weights: LayerWeights, keys: LayerKeys) -> None:
        """Add all of the layer that comes after they were made."""

    def set_rows(self, rows: int) -> None:
        """Set the rows of the next run."""


Enters = Callable[[Tensor, Tensor], Tensor]
"""What a stack's rows start from, [rows, hidden] or `entry`'s inputs, of what is kept above them, [rows, hidden], and
their tokens, [rows].
"""


class GrowingPool(KVPool):
    """A pool that grows, so nobody has to wait for blocks.

    features: [slots + 1, width], what a head keeps of each slot's row; rows that pad a forward write to the last.
    """

    def __init__(
        self,
        shapes: KVShape | Sequence[KVShape],
        blocks: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ):
        super().__init__(shapes, blocks, device)
        self.features = torch.empty(blocks * BLOCK_SIZE + 1, width, dtype=dtype, device=device)
        if device.type != "cpu":
            self.features.zero_()  # what pads a forward reads any row

    def allocate(self, wanted: int) -> list[int]:
        if wanted > self.free:
            self._grow(max(2 * self.blocks, self.blocks + wanted))
        return super().allocate(wanted)

    def _grow(self, blocks: int) -> None:
        shapes, kept = [part.shape for part in self.parts], self.features
        larger = GrowingPool(shapes, blocks, kept.shape[1], kept.dtype, kept.device)
        for new, old in zip(larger.parts, self.parts, strict=True):
            new.keys[:, : self.blocks], new.values[:, : self.blocks] = old.keys, old.values
        larger.features[: len(self.features)] = self.features
        self.parts, self.features = larger.parts, larger.features
        self._free = [*range(blocks - 1, self.blocks - 1, -1), *self._free]
        self._references += [0] * (blocks - self.blocks)
        self.blocks = blocks


def fits(decoder: DecoderLayer) -> bool:
    """Return whether a CPU can run such layers as a stack."""
    sizes = (decoder.out.outputs, decoder.gate_up.outputs, decoder.head_dim * (decoder.heads + 2 * decoder.kv_heads))
    return all(size % LANES == 0 for size in sizes)


@dataclass(frozen=True)
class StackSpec:
    """What a head computes from its rows' inputs to its outputs.

    head: multiplies the last layer's output, or its `norm`. enters: what rows start from. of_token: [vocab, qkv], added
    to the first layer's queries, keys and values. entry: makes the residual from what `enters` gives. keeps: whether a
    row's last residual is kept, in `pool.features`, or what the norm makes of it (`normed`). windows: positions that
    rows of each layer see, 0: all; (): all in all layers. around: of each layer; (): none.
    """

    layers: Sequence[ProgramLayer]
    dtype: torch.dtype
    head: RunsRows
    enters: Enters
    norm: RMSNorm | Norm | None = None
    of_token: Tensor | None = None
    entry: RunsRows | None = None
    keeps: bool = False
    normed: bool = False
    windows: Sequence[int] = ()
    around: Sequence[Around] = ()

    @property
    def own_layers(self) -> list[StackLayer]:
        """The layers, where they are those of `drafters.heads.layers`."""
        return [layer for layer in self.layers if isinstance(layer, StackLayer)]

    @property
    def first(self) -> DecoderLayer:
        return self.own_layers[0].decoder

    def kv_shape(self, pairs: bool = False) -> KVShape:
        """Return the shape of the pool that holds what its layers read. pairs: see `KVShape`."""
        _, kv_heads, head_dim = self.layers[0].heads
        return KVShape(len(self.layers), kv_heads, head_dim, self.dtype, pairs)


class Stack:
    """Runs what a spec says, for the rows of all requests."""

    def __init__(self, spec: StackSpec):
        self.spec, self.dtype = spec, spec.dtype
        first = self.first = spec.layers[0]
        self.hidden = first.hidden
        self.pool = GrowingPool(spec.kv_shape(has_pairs(spec.dtype)), _BLOCKS, self.hidden, torch.float32)
        self.cos_sin = first.rotation(256)  # as the kernels read them
        self._adds = np.zeros(1, ADD_TOKENS)
        self._program = self._program_for(1)

    def reserve_positions(self, positions: int) -> None:
        """Compute the cosines and sines of `positions` positions."""
        if positions > len(self.cos_sin):
            self.cos_sin = self.first.rotation(2 * positions)

    def run(self, above: Sequence[int], parts: Sequence[Rows], chosen: Sequence[int] | None) -> Tensor:
        """Return the head's outputs for the chosen rows (None: all), [chosen, outputs]. above: [rows], the slots of the
        pool that hold what each row enters with.
        """
        for part in parts:
            part.cache.reserve(part.first + len(part))
        batch = Batch(parts)
        rows = len(batch)
        self.reserve_positions(batch.reach)
        if rows > self._program.capacity or self._blocks != self.pool.blocks:
            self._program = self._program_for(max(self._program.capacity, 1 << (rows - 1).bit_length()))
        spec, program, places = self.spec, self._program, self._attention.begin(batch)
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        begun = spec.enters(torch.from_numpy(self._features.take(above, 0)), tokens)
        if spec.entry is None:
            program.residual[:rows] = begun
        else:
            program.buffers["entering"][:rows] = begun
            program.residual[:rows] = 0
        picked = None if chosen is None else np.asarray(chosen, np.int32)
        count, address = (rows, 0) if picked is None else (len(picked), picked.ctypes.data)
        self._adds["tokens"], self._adds["rows"] = places.tokens, rows
        for around in spec.around:
            around.set_rows(rows)
        program.begin(rows, places.positions, places.slots, [self.cos_sin], count=count, chosen=address)
        out = program.run_to_head(program.new_out(count))
        if spec.keeps:  # of rows that were not chosen the last residual is not computed
            kept = slice(0, rows) if picked is None else picked
            normed = program.buffers["x"][:count].float().numpy() if spec.normed else self._residual[kept]
            self._features[batch.slots[kept]] = normed
        return out

    def _program_for(self, capacity: int) -> LayerProgram:
        """Return the program for up to `capacity` rows of all blocks that the pool has now."""
        spec, self._blocks = self.spec, self.pool.blocks
        heads, kv_heads, head_dim = self.first.heads
        self._attention = Attention(self.pool, heads // kv_heads)
        program = LayerProgram([self._attention], capacity, self.hidden, self.dtype, len(spec.layers))
        if spec.entry is not None:
            program.buffer("entering", spec.entry.inputs)
            program.product(spec.entry, "entering", "delta", self.hidden)
            program.delta()
        for index, layer in enumerate(spec.layers):
            weights, around = layer.weights, spec.around[index] if spec.around else None
            program.begin_layer(weights.input_norm)
            if around is not None:
                around.enter(program)
            program.product(layer.qkv, "x", "qkv", layer.qkv.outputs)
            if index == 0 and spec.of_token is not None:
                out = program.buffers["qkv"]
                self._adds["table"], self._adds["out"] = spec.of_token.data_ptr(), out.data_ptr()
                self._adds["columns"], self._adds["width"] = out.shape[1], out.itemsize
                program.add(add_tokens_kernel(), address_of(self._adds))
            window = spec.windows[index] if spec.windows else 0
            keys = LayerKeys(self._attention, index, Rule(head_dim**-0.5, window))
            if around is None:
                attention_and_mlp(program, weights, keys, "qkv")
            else:
                around.build(program, weights, keys)
        program.norm(norm_of(spec.norm))
        program.head(spec.head, spec.head.outputs)
        # numpy takes less time than torch to copy a few rows
        self._features, self._residual = self.pool.features.numpy(), program.residual.numpy()
        return program
