"""A head's decoder layers and its output matrix as one program on a CPU: all products, norms and attention of a forward
in one call.

Rows are flat and belong to any requests; keys and values of all requests lie in one pool of blocks. A row sees the
first `prefix` slots of its request and a list of others, so a tree needs no mask
(`engine.kernels.attention.attention`), and no row's result depends on the other rows. The residual stream and the
features are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from drafters.heads.enter import Enter
from drafters.heads.layers import DecoderLayer, Linear, RMSNorm
from engine.core.batch import Batch, BatchAddresses, Int, Rows
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Attention, Rule, has_pairs
from engine.kernels.fused import NORM, enter_kernel, norm_kernel
from engine.kernels.gemm.matmul import NO_SCRATCH, add_product, give_scratch, row_words
from engine.kernels.gemm.matmul_kernels import MATMUL
from engine.kernels.simd import BFLOAT16, FLOAT32, LANES, add, int_at, load, store
from engine.kernels.threads import Program, address_of, kernel, member, members, words
from engine.model.kv_pool import KVCache, KVPool

_BLOCKS = 256  # of the pool initially; it grows
ALONE = 8  # rows of a small kernel that do not justify waking the other threads

ADD_TOKENS = np.dtype([(name, "i8") for name in ("table", "tokens", "out", "rows", "columns", "width")])


@kernel(ADD_TOKENS)
def add_tokens_kernel(address: Any) -> None:
    """out [rows, columns] += table[tokens]. tokens: [rows] int32."""
    work = carray(address, 1)[0]
    for row in range(member(), work.rows, members()):
        source = work.table + int_at(work.tokens + 4 * row) * work.columns * work.width
        out = work.out + row * work.columns * work.width
        for at in range(0, work.columns * work.width, LANES * work.width):
            if work.width == BFLOAT16:
                store(add(load(out + at, BFLOAT16), load(source + at, BFLOAT16)), out + at, BFLOAT16)
            else:
                store(add(load(out + at, FLOAT32), load(source + at, FLOAT32)), out + at, FLOAT32)


@dataclass(frozen=True)
class StackLayer:
    """input_norm: None where the caller gives the input of the first product."""

    qkv: Linear
    decoder: DecoderLayer
    input_norm: RMSNorm | None


class PooledCache(KVCache):
    """One request's keys and values in the pool of a stack."""

    def places(self, first: int, count: int) -> Int:
        """[count]: places in the pool of the slots from `first` on."""
        self.reserve(first + count)
        return self._slots(np.arange(first, first + count, dtype=np.int32))


class GrowingPool(KVPool):
    """A pool that grows, so nobody has to wait for blocks."""

    def take(self, wanted: int) -> list[int]:
        if wanted > self.free:
            self._grow(max(2 * self.blocks, self.blocks + wanted))
        return super().take(wanted)

    def _grow(self, blocks: int) -> None:
        larger = KVPool(self.shape, blocks)
        larger.keys[:, : self.blocks], larger.values[:, : self.blocks] = self.keys, self.values
        self.keys, self.values = larger.keys, larger.values
        self._free = [*range(blocks - 1, self.blocks - 1, -1), *self._free]
        self._references += [0] * (blocks - self.blocks)
        self.blocks = blocks


def fits(hidden: int, decoder: DecoderLayer) -> bool:
    """Whether this machine can run such layers as a stack."""
    sizes = (hidden, decoder.gate_up.outputs, decoder.head_dim * (decoder.heads + 2 * decoder.kv_heads))
    return decoder.device.type == "cpu" and all(size % LANES == 0 for size in sizes)


class Stack:
    """head: multiplies the last layer's output, or its `norm`. of_token: [vocab, qkv], added to the first layer's
    queries, keys and values. entry: makes the residual from the rows' inputs, before a first layer with an input norm.

    `residual` [capacity, hidden] holds the rows' residuals in and out, `x` [capacity, hidden] the first product's input
    (where the first layer has no input norm) and, at the end, the head's.
    """

    def __init__(
        self,
        layers: Sequence[StackLayer],
        dtype: torch.dtype,
        head: Linear,
        norm: RMSNorm | None = None,
        of_token: Tensor | None = None,
        entry: Linear | None = None,
    ):
        self.layers, self.dtype, self.norm, self.of_token = list(layers), dtype, norm, of_token
        self.head, self.entry = head, entry
        first = self.first = layers[0].decoder
        self.hidden, self.inner = first.out.outputs, first.gate_up.outputs
        self.qkv = (first.heads + 2 * first.kv_heads) * first.head_dim
        shape = KVShape(len(layers), first.kv_heads, first.head_dim, dtype, has_pairs(dtype))
        self.pool = GrowingPool(shape, _BLOCKS)
        self.turns = first.rotary.halves(256)  # [positions, head_dim], as the kernels read them
        self._capacity, self._program = 0, Program()
        self._scratch_of_products = NO_SCRATCH
        self._blocks = 0  # of the pool that the program is for

    def reserve_turns(self, positions: int) -> None:
        """Compute the rotary turns of `positions` positions."""
        if positions > len(self.turns):
            self.turns = self.first.rotary.halves(2 * positions)

    def _reserve(self, rows: int) -> None:
        """Allocate room for `rows` rows."""
        if rows > self._capacity or self._blocks != self.pool.blocks:
            self._build(max(self._capacity, 1 << (rows - 1).bit_length()))

    def run(self, parts: Sequence[Rows], begun: Tensor, x: Tensor | None, chosen: Sequence[int] | None) -> Tensor:
        """The head's outputs for the chosen rows (None: all), [chosen, outputs].

        begun: the rows' residuals [rows, hidden], or what `entry` makes them from; x: the first product's input, for
        layers without an input norm. A chosen row's output before the norm is in `residual` afterwards.
        """
        for part in parts:
            part.cache.reserve(part.first + len(part))
        batch = Batch(parts)
        rows = len(batch)
        self.reserve_turns(batch.reach)
        self._reserve(rows)
        places = self.attention.begin(batch)
        if self.entry is None:
            self.residual[:rows] = begun
        else:
            self._buffers["entering"][:rows] = begun
            self.residual[:rows] = 0
        if x is not None:
            self.x[:rows] = x
        picked = None if chosen is None else np.asarray(chosen, np.int32)
        count = rows if picked is None else len(picked)
        self._rows, self._picked = rows, picked
        out = self._out = self.x.new_empty(count, self.head.outputs)
        self._set(rows, picked, count, places)
        self._program.run(rows, 0, len(self._program))
        return out

    def _set(self, rows: int, picked: Any, count: int, places: BatchAddresses) -> None:
        """Set what depends on the batch."""
        self._norms["count"] = self._adds["rows"] = rows
        if self.norm is not None:
            self._norms["count"][-1] = count
            self._norms["chosen"][-1] = 0 if picked is None else picked.ctypes.data
        self._of_products[:], self._of_products[-1] = row_words(rows), row_words(count)
        self._products["out"][-1] = self._out.data_ptr()
        self._scratch_of_products = give_scratch(self._products, self._scratch_of_products)
        self._enter.begin(places.positions, places.slots, self.turns, self.attention.queries.data_ptr(), rows)
        self._adds["tokens"] = places.tokens

    def _build(self, capacity: int) -> None:
        """Build the program for up to `capacity` rows: its buffers and its records."""
        first = self.first
        self.attention = Attention(self.pool, first.heads // first.kv_heads)
        self._capacity, self._blocks = capacity, self.pool.blocks
        sizes = {"x": self.hidden, "qkv": self.qkv, "attended": first.heads * first.head_dim}
        sizes |= {"inner": self.inner, "delta": self.hidden}
        if self.entry is not None:
            sizes["entering"] = self.entry.inputs
        self._buffers = {name: torch.zeros(capacity, size, dtype=self.dtype) for name, size in sizes.items()}
        self.x, self.residual = self._buffers["x"], torch.zeros(capacity, self.hidden)
        self._norms = np.zeros(2 * len(self.layers) + 1, NORM)
        self._adds, self._products = np.zeros(1, ADD_TOKENS), np.zeros(4 * len(self.layers) + 2, MATMUL)
        decoders = [layer.decoder for layer in self.layers]
        self._enter = Enter(self.pool, decoders, self._buffers["qkv"], self.attention.groups)
        self._of_products = words(self._products, "rows", "tiles")
        self._scales: list[Tensor] = []  # the records point into these
        self._norms["residual"], self._norms["out"] = self.residual.data_ptr(), self.x.data_ptr()
        self._norms["hidden"], self._norms["delta"] = self.hidden, self._buffers["delta"].data_ptr()
        self._adds["out"], self._adds["columns"] = self._buffers["qkv"].data_ptr(), self.qkv
        self._norms["width"] = self._adds["width"] = self.dtype.itemsize
        self._program, last = Program(), 4 * len(self.layers)
        if self.entry is None:
            self._norms["delta"][0] = 0
        else:
            self._add_product(last, self.entry, "entering", "delta")
        for index, layer in enumerate(self.layers):
            self._add_layer(index, layer)
        if self.norm is not None:
            self._add_norm(2 * len(self.layers), self.norm)
        else:
            self._program.call(self._sum)
        self._out = self.x.new_empty(0, self.head.outputs)
        add_product(
            self._program, self._products, last + 1, self.head, self.x, self._out,
            lambda: (self.x[: len(self._out)], self._out),
        )  # fmt: skip

    def _add_layer(self, index: int, layer: StackLayer) -> None:
        decoder = layer.decoder
        if layer.input_norm is not None:
            self._add_norm(2 * index, layer.input_norm)
        self._add_product(4 * index, layer.qkv, "x", "qkv")
        if index == 0 and self.of_token is not None:
            self._adds["table"] = self.of_token.data_ptr()
            self._program.add(add_tokens_kernel(), address_of(self._adds), ALONE)
        self._program.add(enter_kernel(), self._enter.address(index), ALONE)
        rule = Rule(decoder.head_dim**-0.5)
        self._program.add(self.attention.kernel, self.attention.record(index, rule, self._buffers["attended"]))
        self._add_product(4 * index + 1, decoder.out, "attended", "delta")
        self._add_norm(2 * index + 1, decoder.norm)
        self._add_product(4 * index + 2, decoder.gate_up, "x", "inner")
        self._add_product(4 * index + 3, decoder.down, "inner", "delta")

    def _add_norm(self, index: int, norm: RMSNorm) -> None:
        self._norms["weight"][index], self._norms["epsilon"][index] = self._scale(norm), float(norm.eps)
        self._program.add(norm_kernel(), address_of(self._norms, index), ALONE)

    def _scale(self, norm: RMSNorm) -> int:
        self._scales.append(norm.weight.float().contiguous())
        address: int = self._scales[-1].data_ptr()
        return address

    def _add_product(self, index: int, linear: Linear, source: str, goal: str) -> None:
        x, out = self._buffers[source], self._buffers[goal]

        def used() -> tuple[Tensor, Tensor]:
            return x[: self._rows], out[: self._rows]

        add_product(self._program, self._products, index, linear, x, out, used)

    def _sum(self) -> None:
        """The last step if no norm adds the last product."""
        rows = slice(self._rows) if self._picked is None else torch.from_numpy(self._picked)
        self.residual[: self._rows].add_(self._buffers["delta"][: self._rows])
        ends = self.residual[rows]
        self.x[: len(ends)] = ends
