"""A decoder's layers as one program: norms, products, attention and what lies between them, in one call.

The steps of a layer (boxes) and the buffers that they read and write, [rows, ...] each:

    residual --> [norm] --> x --> [product qkv] --> qkv --> [enter] --> queries --> [attend] --> attended
       ^                                                       |                       ^            |
       |                                                       +--> keys, values ------+            |
       +------------ delta <-- [product out] <------------------------------------------------------+

    residual --> [norm] --> x --> [product gate_up] --> gate_up --> [gate] --> inner
       ^                                          (or inner, where the product gates)  |
       +------------ delta <-- [product down] <----------------------------------------+

`residual` is float32, the other buffers have the model's type. A product leaves its result in `delta`; the next norm
adds that to the residual, or its norm, or a share of it. Experts may take the place of gate_up, gate and down
(`engine.kernels.layer.experts`). `enter` normalises and rotates queries and keys, writes keys and values to the pool,
and lays out `queries` for attention. A decoder or a draft head adds the ends: where the residual comes from, and what
multiplies the last norm's rows.

Products read rows where a norm, attention or a gate wrote them: `LayerProgram.product` is the one place for a step that
prepares rows for a product, such as one that quantises them.

A row's result is the same bits whatever the other rows. The kernels' records hold raw addresses: the program keeps the
tensors that they point to, and `begin` sets what depends on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention.attention import Attention, Rule
from engine.kernels.attention.kv_codes import enter_codes_kernel
from engine.kernels.fused import ENTER, GATE, NORM, enter_kernel, gate_kernel, norm_kernel
from engine.kernels.gemm.matmul import NO_SCRATCH, Multiplies, add_product, give_scratch, row_words
from engine.kernels.gemm.matmul_kernels import MATMUL
from engine.kernels.gemm.onednn import filled
from engine.kernels.layer.experts import (
    ExpertRecords,
    combine_kernel,
    experts_kernel,
    gather_kernel,
    pack_kernel,
    route_kernel,
)
from engine.kernels.layer.row_kernels import ROW_GATE, ROW_NORM, row_gate_kernel, row_norm_kernel
from engine.kernels.layer.weights import AttentionWeights, ExpertMlp, GatedMlp, LayerWeights, Norm
from engine.kernels.quant.embedding import EMBED, embed_kernel, tiled_embed_kernel
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.state.walk import LayerPlace
from engine.kernels.threads import Kernel, Program, address_of, int_fields

FEW_ROWS = 8  # of a small kernel: waking the other threads costs as much as their work


class _Records:
    """The records of one kind of kernel, in one array, so that a field of all can be set at once."""

    def __init__(self, kind: np.dtype[Any], most: int):
        self.all, self._used = np.zeros(most, kind), 0

    def add(self, **fields: float) -> int:
        """The address of a new record with these fields."""
        record = self.all[self._used]
        for name, value in fields.items():
            record[name] = value
        self._used += 1
        return address_of(self.all, self._used - 1)

    @property
    def latest(self) -> int:
        """The index of the newest record."""
        return self._used - 1


class LayerProgram:
    """A program for up to `capacity` rows, built step by step.

    buffers: [capacity, width] by name, those of packed rows longer; residual: [capacity, hidden] float32.
    layers: the most that there will be.
    """

    def __init__(self, attention: Attention, capacity: int, hidden: int, dtype: torch.dtype, layers: int):
        self.attention, self.capacity, self.rows = attention, capacity, 0
        self.residual = torch.zeros(capacity, hidden)
        self.buffers: dict[str, Tensor] = {}
        self._dtype, self._kept_alive = dtype, list[Tensor]()
        self._steps = Program()
        self._norms, self._enters = _Records(NORM, 2 * layers + 1), _Records(ENTER, layers)
        self._products, self._gates = _Records(MATMUL, 7 * layers + 2), _Records(GATE, layers)
        self._embeds, self._row_norms = _Records(EMBED, 1), _Records(ROW_NORM, 2 * layers)
        self._row_gates = _Records(ROW_GATE, layers)
        self._experts: list[ExpertRecords] = []
        self._others: list[np.ndarray[Any, Any]] = []  # records of layers with a state
        self._of_embed = int_fields(self._embeds.all, "tokens", "rows")
        self._of_enters, self._cos_sin = int_fields(self._enters.all, "positions", "rows"), self._enters.all["cos_sin"]
        self._tables: list[int] = []  # of cosines and sines, one for each of `enters`
        self._of_products = int_fields(self._products.all, "rows", "tiles")
        self._counts, self._chosen, self._kept = (self._norms.all[name] for name in ("count", "chosen", "kept"))
        self._delta: dict[str, float] = {}  # what the next norm adds to the residual, as fields of its record
        self._out = torch.zeros(0, dtype=dtype)
        self._end: int | None = None  # where the head's step is
        self._scratch, self._scratch_of_products, self._threads = torch.zeros(0), list[Tensor](), 0

    def buffer(self, name: str, width: int, times: int = 1) -> Tensor:
        """The buffer of that name, made when it is first named. times: its rows for each row of the batch."""
        if name not in self.buffers:
            self.buffers[name] = torch.zeros(times * self.capacity, width, dtype=self._dtype)
        return self.buffers[name]

    # The steps, in order.

    def embed(self, embedding: Tensor | TiledMatrix, scale: float) -> None:
        """residual = scale * the tokens' rows of the embedding, [vocab, hidden]."""
        numbers = embedding.tiles if isinstance(embedding, TiledMatrix) else embedding
        ends = {"embedding": numbers.data_ptr(), "residual": self.residual.data_ptr()}
        sizes, kernel = {"hidden": self.residual.shape[1], "width": numbers.itemsize}, embed_kernel()
        if isinstance(embedding, TiledMatrix):
            sizes["panel_bytes"] = embedding.panel_bytes
            kernel = tiled_embed_kernel(embedding.layout, embedding.arrangement)
        self.add(kernel, self._embeds.add(scale=scale, **ends, **sizes))

    def norm(self, norm: Norm | None) -> None:
        """residual += delta, if there is one by now; x = the norm of the residual, or the residual itself."""
        hidden, fields, self._delta = self.residual.shape[1], self._delta, {}
        if norm is not None:
            fields |= {"weight": self._address(norm.weight), "epsilon": norm.epsilon}
        ends = {"residual": self.residual.data_ptr(), "out": self.buffer("x", hidden).data_ptr()}
        self.add(norm_kernel(), self._norms.add(hidden=hidden, width=self._dtype.itemsize, **ends, **fields))

    def delta(self, norm: Norm | None = None, scale: float = 1.0) -> None:
        """Not a step of its own: the next norm adds `delta` to the residual, its norm, or so many times it."""
        self._delta = {"delta": self.buffers["delta"].data_ptr(), "delta_scale": scale}
        if norm is not None:
            self._delta |= {"delta_weight": self._address(norm.weight), "epsilon": norm.epsilon}

    def product(self, product: Multiplies, source: str, goal: str, outputs: int) -> None:
        """goal [rows, outputs] = product(source)."""
        self._products.add()
        x, out = self.buffers[source], self.buffer(goal, outputs)

        def used() -> tuple[Tensor, Tensor]:
            rows = filled(self.rows)  # the buffers have that many, which saves the product a copy
            return x[:rows], out[:rows]

        add_product(self._steps, self._products.all, self._products.latest, product, x, out, used)

    def enter(self, layer: int, source: str, weights: AttentionWeights) -> None:
        """Write the layer's keys and values to the pool, and lay out its queries. source: a buffer like `qkv`."""
        shape, q_per_kv, qkv = self.attention.pool.shape, self.attention.q_per_kv, self.buffers[source]
        keys, values = self.attention.pool.addresses(layer)
        fields = {"qkv": qkv.data_ptr(), "keys": keys, "values": values, "rotated": weights.rotated}
        fields |= {"stride": qkv.stride(0) * qkv.itemsize}
        fields |= {"q_per_kv": q_per_kv, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        fields |= {"dims": shape.dims, "width": shape.dtype.itemsize, "vnni": shape.vnni}
        norms: dict[str, float] = {}
        queries = q_per_kv * shape.kv_heads * shape.head_dim
        for name, norm, first in (("query_norm", weights.query_norm, 0), ("key_norm", weights.key_norm, queries)):
            if norm is not None and len(norm.weight) == shape.head_dim:
                norms |= {name: self._address(norm.weight), "epsilon": norm.epsilon}
            elif norm is not None:
                self._row_norm(norm, qkv, first)
        kernel = enter_codes_kernel() if shape.q8_0 else enter_kernel()
        self.add(kernel, self._enters.add(**fields, **norms))
        self._tables.append(weights.rotary_table)

    def _row_norm(self, norm: Norm, x: Tensor, first: int) -> None:
        """Normalise the columns of x from `first` on, as many as the norm has weights."""
        place = x.data_ptr() + first * x.itemsize
        fields = {"x": place, "stride": x.stride(0) * x.itemsize, "weight": self._address(norm.weight)}
        fields |= {"columns": len(norm.weight), "width": x.itemsize}
        self.add(row_norm_kernel(), self._row_norms.add(epsilon=norm.epsilon, **fields))

    def attend(self, layer: int, rule: Rule) -> None:
        """attended = the attention of the queries to the layer's keys and values."""
        shape = self.attention.pool.shape
        out = self.buffer("attended", self.attention.q_per_kv * shape.kv_heads * shape.head_dim)
        self._steps.add(self.attention.kernel, self.attention.record(layer, rule, out))

    def _gate(self, name: str, gates: str) -> None:
        """Multiply a buffer's rows by the sigmoid of the last columns of another's."""
        x, gate = self.buffers[name], self.buffers[gates]
        place = gate.data_ptr() + (gate.shape[1] - x.shape[1]) * gate.itemsize
        fields = {"x": x.data_ptr(), "columns": x.shape[1], "width": x.itemsize}
        fields |= {"gate": place, "stride": gate.stride(0) * gate.itemsize}
        self.add(row_gate_kernel(), self._row_gates.add(**fields))

    def attention_and_mlp(self, layer: int, weights: LayerWeights, rule: Rule) -> None:
        """All of a layer that comes after `qkv` was made of its input. layer: its number in the pool."""
        assert isinstance(weights.mixer, AttentionWeights)
        self.enter(layer, "qkv", weights.mixer)
        self.attend(layer, rule)
        if weights.mixer.gated:
            self._gate("attended", "qkv")
        self._after_mixer(weights, "attended")

    def state_and_mlp(self, weights: LayerWeights, place: LayerPlace) -> None:
        """All of a layer with a state that comes after the norm of its input."""
        assert not isinstance(weights.mixer, AttentionWeights)
        self._after_mixer(weights, weights.mixer.build(self, place))

    def step(self, kernel: Kernel, records: np.ndarray[Any, Any]) -> None:
        """A step of a layer with a state. records: one, which the program keeps."""
        self._others.append(records)
        self._steps.add(kernel, address_of(records))

    def _after_mixer(self, weights: LayerWeights, made: str) -> None:
        """made: the buffer that the mixer's last product multiplies."""
        self.product(weights.mixer.out, made, "delta", self.residual.shape[1])
        self.delta(weights.out_norm, weights.residual_scale)
        self.norm(weights.inner_norm)
        if isinstance(weights.mlp, GatedMlp):
            self._mlp(weights.mlp, "inner", "delta")
        else:
            self._experts_of(weights.mlp)
        self.delta(weights.down_norm, weights.residual_scale)

    def _mlp(self, mlp: GatedMlp, inner: str, goal: str) -> None:
        """goal = down(act(gate) * up) of x. inner: the name of the buffer between the products."""
        if mlp.gated:
            self.product(mlp.gate_up, "x", inner, mlp.inner)
        else:
            both = f"{inner}_gate_up"
            self.product(mlp.gate_up, "x", both, 2 * mlp.inner)
            ends = {"gate_up": self.buffers[both].data_ptr(), "out": self.buffer(inner, mlp.inner).data_ptr()}
            record = self._gates.add(inner=mlp.inner, width=self._dtype.itemsize, gelu=mlp.gelu, **ends)
            self._steps.add(gate_kernel(), record)
        self.product(mlp.down, inner, goal, self.residual.shape[1])

    def _experts_of(self, mlp: ExpertMlp) -> None:
        """delta = what the experts of each row make of x."""
        self.product(mlp.router, "x", "router", len(mlp.gate_up) + (mlp.shared is not None))
        hidden = self.residual.shape[1]
        if mlp.shared is not None:
            self._mlp(mlp.shared, "shared_inner", "shared")
        ends = self.buffers["x"], self.buffers["router"], self.buffer("delta", hidden)
        packed = self.buffer("packed", hidden, mlp.top_k), self.buffer("packed_inner", mlp.inner, mlp.top_k)
        experts = ExpertRecords(mlp, *ends, *packed, self.buffers["shared"] if mlp.shared is not None else None)
        self._experts.append(experts)
        for kernel in (route_kernel, pack_kernel, gather_kernel):
            self.add(kernel(), experts.up)
        for part in (experts.up, experts.down):
            self._steps.add(experts_kernel(), part)
        self.add(combine_kernel(), experts.up)

    def head(self, product: Multiplies, outputs: int) -> None:
        """The last step: `run_to_head` returns product(x)."""
        self._products.add()
        self._end, self._out = len(self._steps), self._out.new_empty(0, outputs)
        add_product(
            self._steps, self._products.all, self._products.latest, product, self.buffers["x"], self._out,
            lambda: (self.buffers["x"][: len(self._out)], self._out),
        )  # fmt: skip

    def add(self, kernel: Kernel, record: int) -> None:
        """A step of a small kernel."""
        self._steps.add(kernel, record, FEW_ROWS)

    def _address(self, weight: Tensor) -> int:
        """The address of a weight that the program keeps."""
        self._kept_alive.append(weight)
        address: int = weight.data_ptr()
        return address

    # A run.

    def begin(
        self,
        rows: int,
        positions: int,
        slots: int,
        cos_sin: Sequence[Tensor],
        tokens: int = 0,
        count: int = -1,
        chosen: int = 0,
    ) -> None:
        """Set up the next run. positions, slots, tokens: addresses of [rows] int32. cos_sin: the rotary tables,
        [positions, rotated] each.

        count, chosen: how many rows the last norm has, -1 for all, and the address of their numbers, 0 for the first.
        """
        if (threads := torch.get_num_threads()) != self._threads:
            self._make_scratch(threads)
        if rows != self.rows:
            self._gates.all["rows"] = self._row_norms.all["rows"] = self._counts[:] = rows
            self._row_gates.all["rows"] = rows
            for experts in self._experts:
                experts.of_batch[:] = rows
            self._of_products[:] = row_words(rows)
            self.rows = rows
        self._counts[self._norms.latest], self._chosen[self._norms.latest] = rows if count < 0 else count, chosen
        self._of_embed[:] = tokens, rows
        room = self.attention.queries.data_ptr(), self._scratch.data_ptr()
        self._of_enters[:] = positions, slots, *room, rows
        addresses = [table.data_ptr() for table in cos_sin]
        self._cos_sin[: len(self._tables)] = addresses[0] if len(addresses) == 1 else np.take(addresses, self._tables)

    def keep(self, layers: Sequence[int]) -> Tensor | None:
        """[rows, layers, hidden], to be filled with the inputs of these layers, each named once; the layer number past
        the last is left out. None for no layers.
        """
        self._kept[:] = 0
        if not layers:
            return None
        features = self._out.new_empty(self.rows, len(layers), self.residual.shape[1])
        self._norms.all["stride"] = features.stride(0) * features.itemsize
        for column, layer in enumerate(layers):
            if 2 * layer < self._norms.latest:  # a layer has two norms
                self._kept[2 * layer] = features.data_ptr() + column * features.stride(1) * features.itemsize
        return features

    def run(self) -> None:
        """Run all steps but the head's."""
        self._steps.run(self.rows, 0, len(self._steps) if self._end is None else self._end)

    def new_out(self, count: int) -> Tensor:
        """Allocate the head's outputs for `count` rows."""
        return self._out.new_empty(count, self._out.shape[1])

    def run_to_head(self, out: Tensor) -> Tensor:
        """Run all steps. Returns the head's outputs for the first rows of the last norm, as many as `out` has."""
        self._out, count = out, len(out)
        if not count:
            self.run()
            return self._out
        last = self._products.latest
        self._products.all["out"][last], self._of_products[last] = self._out.data_ptr(), row_words(count)
        self._steps.run(self.rows, 0, len(self._steps))
        return self._out

    def _make_scratch(self, threads: int) -> None:
        """Allocate scratch for `threads` threads."""
        self._scratch, self._scratch_of_products = torch.zeros(threads * self.attention.pool.shape.dims), []
        held = NO_SCRATCH
        for products in (self._products.all, *(experts.products for experts in self._experts)):
            held = give_scratch(products, held)
            self._scratch_of_products.append(held)  # earlier records keep a smaller one
        self._threads = threads
