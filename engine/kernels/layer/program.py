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

from engine.kernels.attention.attention import Attention, LayerKeys
from engine.kernels.attention.enter import ENTER, enter_kernel
from engine.kernels.attention.kv_codes import enter_codes_kernel
from engine.kernels.gemm.matmul import NO_SCRATCH, Matmul, Multiplies, add_product, give_scratch, row_words
from engine.kernels.gemm.matmul_kernels import MATMUL
from engine.kernels.gemm.onednn import filled
from engine.kernels.layer.activation import GATE, Activation, gate_kernel
from engine.kernels.layer.experts import (
    ExpertRecords,
    combine_kernel,
    experts_kernel,
    gather_kernel,
    pack_kernel,
    route_kernel,
)
from engine.kernels.layer.heads import COPY, HeadRecords, copy_kernel, heads_kernel
from engine.kernels.layer.norm import NORM, norm_kernel
from engine.kernels.layer.row_kernels import (
    CLIP,
    LAYER_INPUTS,
    ROUND,
    ROW_GATE,
    ROW_NORM,
    clip_kernel,
    layer_inputs_kernel,
    round_kernel,
    row_gate_kernel,
    row_norm_kernel,
)
from engine.kernels.layer.weights import (
    AttentionWeights,
    ExpertMlp,
    Norm,
    PerLayerInputs,
)
from engine.kernels.quant.embedding import EMBED, embed_kernel, tiled_embed_kernel
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.threads import Kernel, Program, address_of, int_fields

FEW_ROWS = 8  # of a small kernel: waking the other threads costs as much as their work


class _Records:
    """The records of one kind of kernel, in one array, so that a field of all can be set at once."""

    def __init__(self, kind: np.dtype[Any], most: int):
        self.all, self._used = np.zeros(most, kind), 0

    def add(self, **fields: float) -> int:
        """Return the address of a new record with these fields."""
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
    attentions: one for each shape of keys and queries. layers: the most that there will be.
    """

    def __init__(self, attentions: Sequence[Attention], capacity: int, hidden: int, dtype: torch.dtype, layers: int):
        self.attentions, self.capacity, self.rows = attentions, capacity, 0
        self.residual = torch.zeros(capacity, hidden, dtype=torch.float32)
        self.buffers: dict[str, Tensor] = {}
        self._dtype, self._kept_alive = dtype, list[Tensor]()
        self._steps = Program()
        self._norms, self._enters = _Records(NORM, 6 * layers + 2), _Records(ENTER, layers)
        self._products, self._gates = _Records(MATMUL, 10 * layers + 3), _Records(GATE, 2 * layers)
        self._embeds, self._row_norms = _Records(EMBED, 2), _Records(ROW_NORM, 4 * layers)
        self._row_gates, self._layer_inputs = _Records(ROW_GATE, layers), _Records(LAYER_INPUTS, 1)
        self._clips, self._rounds = _Records(CLIP, layers), _Records(ROUND, 8 * layers)
        self._unit_gates, self._units_each = _Records(GATE, layers), 0  # of the packed rows of experts
        self._experts: list[ExpertRecords] = []
        self._copies, self._heads = _Records(COPY, 6 * layers), list[HeadRecords]()
        self._others: list[np.ndarray[Any, Any]] = []  # records of layers with a state
        self._of_embed = int_fields(self._embeds.all, "tokens", "rows")
        self._of_enters, self._cos_sin = int_fields(self._enters.all, "positions", "rows"), self._enters.all["cos_sin"]
        self._queries = self._enters.all["queries"]
        self._tables: list[int] = []  # of cosines and sines, one for each of `enters`
        self._attended_by: list[int] = []  # the attention of each of `enters`
        self._layer_norms: list[int] = []  # the norm that each layer begins with
        self._of_products = int_fields(self._products.all, "rows", "tiles")
        self._counts, self._chosen, self._kept = (self._norms.all[name] for name in ("count", "chosen", "kept"))
        self._delta: dict[str, float] = {}  # what the next norm adds to the residual, as fields of its record
        self._out = torch.zeros(0, dtype=dtype)
        self._end: int | None = None  # where the head's step is
        self._scratch, self._scratch_of_products, self._threads = torch.zeros(0, dtype=torch.float32), list[Tensor](), 0

    def buffer(self, name: str, width: int, times: int = 1) -> Tensor:
        """Return the buffer of that name, made when it is first named. times: its rows for each row of the batch."""
        if name not in self.buffers:
            self.buffers[name] = torch.zeros(times * self.capacity, width, dtype=self._dtype)
        return self.buffers[name]

    # The steps, in order.

    def embed(self, embedding: Tensor | TiledMatrix, scale: float) -> None:
        """Add a step: residual = scale * the tokens' rows of the embedding, [vocab, hidden]."""
        self._embed(embedding, scale, self.residual)

    def _embed(self, embedding: Tensor | TiledMatrix, scale: float, goal: Tensor) -> None:
        """Add a step: goal, float32 = scale * the tokens' rows of an embedding that is as wide."""
        numbers = embedding.tiles if isinstance(embedding, TiledMatrix) else embedding
        ends = {"embedding": numbers.data_ptr(), "residual": goal.data_ptr()}
        sizes, kernel = {"hidden": goal.shape[1], "width": numbers.itemsize}, embed_kernel()
        if isinstance(embedding, TiledMatrix):
            sizes["panel_bytes"] = embedding.panel_bytes
            kernel = tiled_embed_kernel(embedding.layout, embedding.code_layout)
        self.add(kernel, self._embeds.add(scale=scale, **ends, **sizes))

    def layer_inputs(self, inputs: PerLayerInputs, columns: int) -> None:
        """After `embed`: what the layers get of the tokens beside the residual, `columns` numbers a row."""
        width = len(inputs.norm.weight)
        self.norm(None)
        self.product(inputs.project, "x", "layer_inputs", columns)
        rows = torch.zeros(self.capacity, columns, dtype=torch.float32)
        self._kept_alive.append(rows)
        self._embed(inputs.embedding, inputs.embedding_scale, rows)
        x = self.buffers["layer_inputs"]
        fields = {"x": x.data_ptr(), "of_tokens": rows.data_ptr(), "weight": self._address(inputs.norm.weight)}
        fields |= {"layers": columns // width, "columns": width, "width": x.itemsize}
        record = self._layer_inputs.add(epsilon=inputs.norm.epsilon, scale=inputs.scale, **fields)
        self.add(layer_inputs_kernel(), record)

    def begin_layer(self, norm: Norm | None) -> None:
        """The norm that a layer begins with. See `norm`."""
        self._layer_norms.append(self._norms.latest + 1)
        self.norm(norm)

    @property
    def layers(self) -> int:
        """How many layers have begun."""
        return len(self._layer_norms)

    def norm(self, norm: Norm | None, goal: str = "x") -> None:
        """Add a step: residual += delta, if there is one; x = the norm of the residual, or the residual itself."""
        hidden, fields, self._delta = self.residual.shape[1], {"scale": 1.0} | self._delta, {}
        if norm is not None:
            fields |= {"weight": self._address(norm.weight), "epsilon": norm.epsilon, "centred": norm.centred}
            fields |= {"bias": 0 if norm.bias is None else self._address(norm.bias)}
        ends = {"residual": self.residual.data_ptr(), "out": self.buffer(goal, hidden).data_ptr()}
        self.add(norm_kernel(), self._norms.add(hidden=hidden, width=self._dtype.itemsize, **ends, **fields))

    def delta(self, norm: Norm | None = None, scale: float = 1.0, whole_scale: float = 1.0) -> None:
        """Let the next norm add `delta` to the residual, its norm, or so many times it, and multiply the sum by
        `whole_scale`.
        """
        self._delta = {"delta": self.buffers["delta"].data_ptr(), "delta_scale": scale, "scale": whole_scale}
        if norm is not None:
            self._delta |= {"delta_weight": self._address(norm.weight), "epsilon": norm.epsilon}

    def product(self, product: Multiplies, source: str, goal: str, outputs: int) -> None:
        """Add a step: goal [rows, outputs] = product(source), whose rows are rounded first if the product asks it."""
        self._products.add()
        x, out = self.buffers[source], self.buffer(goal, outputs)
        if product.rounds:
            ends = {"x": x.data_ptr(), "columns": x.shape[1], "width": x.itemsize}
            self.add(round_kernel(), self._rounds.add(**ends))

        def used() -> tuple[Tensor, Tensor]:
            rows = filled(self.rows)  # the buffers have that many, which saves the product a copy
            return x[:rows], out[:rows]

        add_product(self._steps, self._products.all, self._products.latest, product, x, out, used)

    def enter(self, of: LayerKeys, source: str, weights: AttentionWeights) -> None:
        """Write the layer's keys and values to the pool, and lay out its queries. source: a buffer like `qkv`."""
        shape, q_per_kv, qkv = of.attention.pool.shape, of.attention.q_per_kv, self.buffers[source]
        keys, values = of.attention.pool.addresses(of.layer) if of.own else (0, 0)
        fields = {"qkv": qkv.data_ptr(), "keys": keys, "values": values, "rotated": weights.rotated}
        fields |= {"values_are_keys": weights.values_are_keys, "norms_last": weights.norms_last}
        fields |= {"stride": qkv.stride(0) * qkv.itemsize}
        fields |= {"q_per_kv": q_per_kv, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        fields |= {"dims": shape.dims, "width": shape.dtype.itemsize, "vnni": shape.vnni}
        norms: dict[str, float] = {}
        queries = q_per_kv * shape.kv_heads * shape.head_dim
        of_heads = (("query_norm", weights.query_norm, 0), ("key_norm", weights.key_norm, queries))
        for name, norm, first in (*of_heads, ("value_norm", weights.value_norm, 0)):
            if norm is not None and len(norm.weight) == shape.head_dim:
                norms |= {name: self._address(norm.weight), "epsilon": norm.epsilon}
            elif norm is not None:
                self.row_norm(norm, qkv, first)
        kernel = enter_codes_kernel() if shape.q8_0 else enter_kernel()
        self.add(kernel, self._enters.add(**fields, **norms))
        self._tables.append(weights.rotary_table)
        self._attended_by.append(self.attentions.index(of.attention))

    def row_norm(self, norm: Norm, x: Tensor, first: int, added: Tensor | None = None) -> None:
        """Normalise the columns of x from `first` on, as many as the norm has weights, and add what is as wide."""
        place = x.data_ptr() + first * x.itemsize
        fields = {"x": place, "stride": x.stride(0) * x.itemsize, "weight": self._address(norm.weight)}
        fields |= {"added": 0 if added is None else added.data_ptr()}
        fields |= {"columns": len(norm.weight), "width": x.itemsize}
        self.add(row_norm_kernel(), self._row_norms.add(epsilon=norm.epsilon, **fields))

    def attend(self, of: LayerKeys) -> str:
        """Add the attention of the queries to the layer's keys and values. Returns the name of its buffer."""
        attention, shape = of.attention, of.attention.pool.shape
        columns = attention.q_per_kv * shape.kv_heads * shape.head_dim
        out = self.buffer(name := f"attended {columns}", columns)
        self._steps.add(attention.kernel, attention.record(of.layer, of.rule, out, of.use))
        return name

    def by_heads(self, matrices: Sequence[Matmul], source: Tensor, goal: Tensor) -> None:
        """Add steps: goal [rows, heads, outputs] = each head of source [rows, heads, inputs] times its own matrix."""
        heads, inputs, outputs = len(matrices), matrices[0].inputs, matrices[0].outputs
        x = self.buffer(f"{inputs} of heads", inputs, heads).unflatten(0, (heads, -1))
        made = self.buffer(f"{outputs} made of heads", outputs, heads).unflatten(0, (heads, -1))
        self.copy(source, x.transpose(0, 1))
        self._heads.append(HeadRecords(matrices, x, made))
        self._steps.add(heads_kernel(), self._heads[-1].address)
        self.copy(made.transpose(0, 1), goal)

    def copy(self, source: Tensor, goal: Tensor) -> None:
        """Add a step: goal = source. Both: parts of buffers, [rows, heads, numbers], of which 16 divides the last."""
        fields = {"heads": source.shape[1], "size": source.shape[2] * source.itemsize, "width": source.itemsize}
        for name, part in (("source", source), ("goal", goal)):
            row, head, _ = (stride * part.itemsize for stride in part.stride())
            fields |= {name: part.data_ptr(), f"{name}_row": row, f"{name}_head": head}
        self.add(copy_kernel(), self._copies.add(**fields))

    def clip(self, x: Tensor, limit: float) -> None:
        """Cut the numbers of a buffer at `limit` and at its negative."""
        fields = {"x": x.data_ptr(), "columns": x.shape[1], "width": x.itemsize}
        self.add(clip_kernel(), self._clips.add(limit=limit, **fields))

    def gate_rows(self, name: str, gates: str) -> None:
        """Multiply a buffer's rows by the sigmoid of the last columns of another's."""
        x, gate = self.buffers[name], self.buffers[gates]
        place = gate.data_ptr() + (gate.shape[1] - x.shape[1]) * gate.itemsize
        fields = {"x": x.data_ptr(), "columns": x.shape[1], "width": x.itemsize}
        fields |= {"gate": place, "stride": gate.stride(0) * gate.itemsize}
        self.add(row_gate_kernel(), self._row_gates.add(**fields))

    def step(self, kernel: Kernel, records: np.ndarray[Any, Any]) -> None:
        """Add a step of a layer with a state. records: one, which the program keeps."""
        self._others.append(records)
        self._steps.add(kernel, address_of(records))

    def act(
        self,
        gate: str,
        up: int,
        up_stride: int,
        goal: str,
        inner: int,
        activation: Activation,
        scale: float = 1.0,
        amounts: Sequence[float] = (0.0, 0.0),
    ) -> None:
        """Add a step: goal = act(scale * gate) * up. gate: the name of a buffer that begins with it. up: an address,
        rows so far apart. amounts: of XIELU.
        """
        x, out = self.buffers[gate], self.buffer(goal, inner)
        fields = {"gate": x.data_ptr(), "gate_stride": x.stride(0) * x.itemsize, "up": up, "up_stride": up_stride}
        fields |= {"out": out.data_ptr(), "inner": inner, "width": x.itemsize, "activation": activation}
        record = self._gates.add(alpha=scale, above=amounts[0], below=amounts[1], **fields)
        self._steps.add(gate_kernel(), record)

    def _act_on_units(self, mlp: ExpertMlp, both: Tensor, inner: Tensor) -> None:
        """Add a step: inner = act(gate) * up of the packed rows of experts, or act(gate). both: [units, 2 * inner], or
        [units, inner].
        """
        stride, self._units_each = both.stride(0) * both.itemsize, mlp.top_k
        fields = {"gate": both.data_ptr(), "gate_stride": stride, "up_stride": stride, "out": inner.data_ptr()}
        up = 0 if mlp.plain else both.data_ptr() + mlp.inner * both.itemsize
        fields |= {"up": up, "inner": mlp.inner, "width": both.itemsize}
        record = self._unit_gates.add(activation=mlp.activation, alpha=mlp.alpha, limit=mlp.limit, **fields)
        self._steps.add(gate_kernel(), record)

    def experts(self, mlp: ExpertMlp, records: ExpertRecords, made: Tensor, inner: Tensor) -> None:
        """Add the experts that each row chooses, from the choice to their sum. made: what `gate_up` gives, and inner:
        what `down` gets, [units, numbers].
        """
        self._experts.append(records)
        for kernel in (route_kernel, pack_kernel, gather_kernel):
            self.add(kernel(), records.up)
        self._steps.add(experts_kernel(), records.up)
        if not mlp.gated:
            self._act_on_units(mlp, made, inner)
        self._steps.add(experts_kernel(), records.down)
        self.add(combine_kernel(), records.up)

    def head(self, product: Multiplies, outputs: int) -> None:
        """Add the last step: `run_to_head` returns product(x)."""
        self._products.add()
        self._end, self._out = len(self._steps), self._out.new_empty(0, outputs)
        add_product(
            self._steps, self._products.all, self._products.latest, product, self.buffers["x"], self._out,
            lambda: (self.buffers["x"][: len(self._out)], self._out),
        )  # fmt: skip

    def add(self, kernel: Kernel, record: int) -> None:
        """Add a step of a small kernel."""
        self._steps.add(kernel, record, FEW_ROWS)

    def _address(self, weight: Tensor) -> int:
        """Return the address of a weight that the program keeps."""
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
            self._unit_gates.all["rows"] = rows * self._units_each
            self._row_gates.all["rows"] = self._layer_inputs.all["rows"] = self._copies.all["rows"] = rows
            self._clips.all["rows"] = self._rounds.all["rows"] = rows
            for experts in self._experts:
                experts.of_batch[:] = rows
            for heads in self._heads:
                heads.of_batch[:] = row_words(rows)
            self._of_products[:] = row_words(rows)
            self.rows = rows
        self._counts[self._norms.latest], self._chosen[self._norms.latest] = rows if count < 0 else count, chosen
        self._of_embed[:] = tokens, rows
        queries = [attention.queries.data_ptr() for attention in self.attentions]
        self._of_enters[:] = positions, slots, queries[0], self._scratch.data_ptr(), rows
        if len(queries) > 1:
            self._queries[: len(self._attended_by)] = np.take(queries, self._attended_by)
        addresses = [table.data_ptr() for table in cos_sin]
        self._cos_sin[: len(self._tables)] = addresses[0] if len(addresses) == 1 else np.take(addresses, self._tables)

    def keep(self, layers: Sequence[int]) -> Tensor | None:
        """Return [rows, layers, hidden], to be filled with the inputs of these layers, each named once; the layer
        number past the last is left out. None for no layers.
        """
        self._kept[:] = 0
        if not layers:
            return None
        features = self._out.new_empty(self.rows, len(layers), self.residual.shape[1])
        self._norms.all["stride"] = features.stride(0) * features.itemsize
        for column, layer in enumerate(layers):
            if layer < len(self._layer_norms):
                kept = features.data_ptr() + column * features.stride(1) * features.itemsize
                self._kept[self._layer_norms[layer]] = kept
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
        dims = max(attention.pool.shape.dims for attention in self.attentions)
        self._scratch, self._scratch_of_products = torch.zeros(threads * dims, dtype=torch.float32), []
        held = NO_SCRATCH
        of_experts, of_heads = (
            (experts.products for experts in self._experts),
            (heads.products for heads in self._heads),
        )
        for products in (self._products.all, *of_experts, *of_heads):
            held = give_scratch(products, held)
            self._scratch_of_products.append(held)  # earlier records keep a smaller one
        self._threads = threads
