"""A lean forward for the common structure: pre-norm, RMSNorm, rotary positions, grouped queries, gated SiLU.

It takes the weights of a loaded stock model. Whether a model has this structure is read from its modules, never from
its family's name, and confirmed by comparing logits with the stock forward's (`engine.model.target`); any other model
keeps the stock forward. A layer is four products, attention, and fused kernels between them. All layers are one program
(`engine.kernels.threads`): where the products are our own too, a forward is one call instead of the stock forward's
1,500. The residual stream is kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.core.batch import Batch, BatchAddresses
from engine.kernels.attention.attention import Attention, Rule
from engine.kernels.embedding import EMBED, embed_kernel
from engine.kernels.fused import ENTER, GATE, NORM, enter_kernel, gate_kernel, norm_kernel
from engine.kernels.gemm.matmul import NO_SCRATCH, add_product, give_scratch, row_words
from engine.kernels.gemm.matmul_kernels import MATMUL
from engine.kernels.gemm.packed_linear import Product, filled
from engine.kernels.simd import LANES
from engine.kernels.threads import Program, address_of, words
from engine.model.decoder_layer import Layer, Matrices, OtherStructure, joined, only, scale_of
from engine.model.kv_pool import KVPool
from engine.model.rotary import cosines_sines, rounded_up


class LeanDecoder:
    """Runs batches. rules: each layer's attention rule, as the stock forward passed it.

    quantised: matrices that are known in fewer bits, by the address of the weight that each stands for.
    """

    def __init__(self, model: Any, pool: KVPool, groups: int, rules: dict[int, Rule], quantised: Matrices):
        base = getattr(model, "model", None)
        if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
            raise OtherStructure
        only(model, {"model", "lm_head"})
        only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        self.layers = [Layer(layer, quantised) for layer in base.layers]
        self.rules = [rules[i] for i in range(len(self.layers))]
        self.embedding: Tensor = base.embed_tokens.weight.detach().contiguous()
        self.norm, self.epsilon = scale_of(base.norm)
        self.head = joined(quantised, model, ("lm_head",))
        (self.vocab_size, self.hidden), self.dtype = self.embedding.shape, self.embedding.dtype
        self.attention = Attention(pool, groups)
        self.width = groups * pool.shape.kv_heads * pool.shape.head_dim
        self._turns = _Turns(base.rotary_emb)
        self.turned = self._turns.width
        self._check_sizes(pool)
        self._steps = _Steps(self, 1)

    @property
    def exact(self) -> bool:
        """Whether every product gives a row the same bits in any batch."""
        layers = (layer.products for layer in self.layers)
        return all(product.rows is not None for products in (*layers, (self.head,)) for product in products)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the embedding and all matrices."""
        embedding: int = self.embedding.nbytes
        return embedding + self.matrix_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that every forward reads."""
        layers = [product for layer in self.layers for product in layer.products]
        return sum(product.bytes for product in [*layers, self.head])

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Logits of the chosen rows, [chosen, vocab], and features [rows, layers, hidden] if layers are given."""
        rows, last, vocabulary = len(batch), len(self.layers), batch.vocabulary
        if vocabulary.start < 0 or vocabulary.stop > self.vocab_size:  # a kernel would read beyond the embedding
            raise IndexError(f"tokens are numbered from 0 to {self.vocab_size - 1}")
        self._turns.reserve(batch.reach)
        places = self.attention.begin(batch)
        if rows > self._steps.capacity:
            self._steps = _Steps(self, 1 << (rows - 1).bit_length())
        steps = self._steps
        wanted = batch.wanted
        whole = wanted == rows or last in feature_layers
        steps.begin(rows, rows if whole else wanted, places, self._turns.table)
        kept = [*dict.fromkeys(feature_layers)]  # with a shallow target, a head may request a layer twice
        features = steps.keep(kept)
        if whole and 0 < wanted < rows:
            steps.run_to_end()
            logits = self.head(steps.x.index_select(0, torch.from_numpy(batch.chosen)))
        else:
            logits = steps.run_to_logits(wanted)
        if features is not None and last in kept:
            features[:, kept.index(last)] = steps.x[:rows]
        if features is not None and len(kept) < len(feature_layers):
            features = features[:, [kept.index(layer) for layer in feature_layers]]
        return logits, features

    def forget_far(self) -> None:
        """Release the memory that far positions of the trial at load took."""
        self._turns.shrink()

    def _check_sizes(self, pool: KVPool) -> None:
        shape, layer = pool.shape, self.layers[0]
        made = self.width + 2 * shape.kv_heads * shape.head_dim
        if any(other.qkv.outputs != made or other.inner != layer.inner for other in self.layers):
            raise OtherStructure
        if self.hidden % LANES or layer.inner % LANES or self.turned > shape.head_dim:
            raise OtherStructure


_ROWS_WORTH_SHARING = 8  # waking the other threads costs as much as this many rows of a small kernel


class _Steps:
    """The program of all layers for up to `capacity` rows: its buffers and its records."""

    def __init__(self, decoder: LeanDecoder, capacity: int):
        self.capacity, self.attention = capacity, decoder.attention
        layers, shape = decoder.layers, decoder.attention.pool.shape
        sizes = {"x": decoder.hidden, "attended": decoder.width, "inner": layers[0].inner, "delta": decoder.hidden}
        sizes |= {"qkv": layers[0].qkv.outputs, "gate_up": 2 * layers[0].inner}
        self._buffers = {name: torch.zeros(capacity, size, dtype=decoder.dtype) for name, size in sizes.items()}
        self.x, self.residual = self._buffers["x"], torch.zeros(capacity, decoder.hidden)
        self._scratch, self._scratch_of_products = torch.zeros(0), NO_SCRATCH
        self._threads = 0  # that the scratch is for
        self._norms, self._enters = np.zeros(2 * len(layers) + 1, NORM), np.zeros(len(layers), ENTER)
        self._gates, self._products = np.zeros(1, GATE), np.zeros(4 * len(layers) + 1, MATMUL)
        self._embeds = np.zeros(1, EMBED)
        self._logits = self.x.new_empty(0, decoder.head.outputs)
        self._norms["residual"], self._norms["out"] = self.residual.data_ptr(), self.x.data_ptr()
        self._norms["hidden"], self._norms["epsilon"] = decoder.hidden, decoder.epsilon
        self._norms["delta"][1:] = self._buffers["delta"].data_ptr()
        self._enters["qkv"], self._enters["epsilon"] = self._buffers["qkv"].data_ptr(), layers[0].epsilon
        self._enters["kv_heads"], self._enters["groups"] = shape.kv_heads, self.attention.groups
        self._enters["head_dim"], self._enters["dims"] = shape.head_dim, shape.dims
        self._enters["rotated"], self._enters["paired"] = decoder.turned, shape.paired
        self._gates["gate_up"], self._gates["out"] = (self._buffers[name].data_ptr() for name in ("gate_up", "inner"))
        self._gates["inner"] = layers[0].inner
        self._embeds["embedding"], self._embeds["residual"] = decoder.embedding.data_ptr(), self.residual.data_ptr()
        self._embeds["hidden"] = decoder.hidden
        for records in (self._norms, self._enters, self._gates, self._embeds):
            records["width"] = decoder.dtype.itemsize
        self._of_embed, self._of_enter = words(self._embeds, "tokens", "rows"), words(self._enters, "positions", "rows")
        self._of_products, self._goals = words(self._products, "rows", "tiles"), self._products["out"]
        self._counts, self._chosen, self._kept = (self._norms[name] for name in ("count", "chosen", "kept"))
        self._program, self._rows = Program(), 0
        self._program.add(embed_kernel(), address_of(self._embeds), _ROWS_WORTH_SHARING)
        for index, layer in enumerate(layers):
            self._add_layer(index, layer, decoder.rules[index])
        self._add_norm(2 * len(layers), decoder.norm)
        self._end = len(self._program)
        self._add_head(decoder.head)

    def begin(self, rows: int, count: int, places: BatchAddresses, turns: Tensor) -> None:
        """Set up the next run. count: rows of the last norm, all or the chosen ones. places: of the batch's arrays."""
        if (threads := torch.get_num_threads()) != self._threads:
            self._make_scratch(threads)
        if rows != self._rows:
            self._gates["rows"] = self._counts[:] = rows
            self._of_products[:] = row_words(rows)
            self._rows = rows
        self._counts[-1], self._chosen[-1] = count, 0 if count == rows else places.chosen
        self._of_embed[:] = places.tokens, rows
        room = self.attention.queries.data_ptr(), self._scratch.data_ptr()
        self._of_enter[:] = places.positions, places.slots, turns.data_ptr(), *room, rows

    def keep(self, layers: Sequence[int]) -> Tensor | None:
        """[rows, layers, hidden], to be filled with the inputs of these layers, each named once; the layer number past
        the last is left out. None for no layers.
        """
        self._kept[:] = 0
        if not layers:
            return None
        features = self.x.new_empty(self._rows, len(layers), self.x.shape[1])
        self._norms["stride"] = features.stride(0) * features.itemsize
        for column, layer in enumerate(layers):
            if 2 * layer + 1 < len(self._norms):
                self._kept[2 * layer] = features.data_ptr() + column * features.stride(1) * features.itemsize
        return features

    def run_to_end(self) -> None:
        """Run up to the last norm, which leaves its rows in `x`."""
        self._program.run(self._rows, 0, self._end)

    def run_to_logits(self, count: int) -> Tensor:
        """Run up to the logits of the first `count` rows of the last norm, which are returned."""
        self._logits = self.x.new_empty(count, self._logits.shape[1])
        self._goals[-1] = self._logits.data_ptr()
        self._of_products[-1] = row_words(count)
        self._program.run(self._rows, 0, len(self._program) if count else self._end)
        return self._logits

    def _make_scratch(self, threads: int) -> None:
        """Allocate scratch for `threads` threads."""
        self._scratch = torch.zeros(threads * self.attention.pool.shape.dims)
        self._scratch_of_products = give_scratch(self._products, self._scratch_of_products)
        self._threads = threads

    def _add_layer(self, index: int, layer: Layer, rule: Rule) -> None:
        self._add_norm(2 * index, layer.input_norm)
        self._add_product(4 * index, layer.qkv, "x", "qkv")
        record = self._enters[index]
        record["keys"], record["values"] = self.attention.pool.addresses(index)
        record["query_norm"] = 0 if layer.query_norm is None else layer.query_norm.data_ptr()
        record["key_norm"] = 0 if layer.key_norm is None else layer.key_norm.data_ptr()
        self._program.add(enter_kernel(), address_of(self._enters, index), _ROWS_WORTH_SHARING)
        attended = self._buffers["attended"]
        self._program.add(self.attention.kernel, self.attention.record(index, rule, attended))
        self._add_product(4 * index + 1, layer.out, "attended", "delta")
        self._add_norm(2 * index + 1, layer.inner_norm)
        if layer.gate_up.gated:
            self._add_product(4 * index + 2, layer.gate_up, "x", "inner")
        else:
            self._add_product(4 * index + 2, layer.gate_up, "x", "gate_up")
            self._program.add(gate_kernel(), address_of(self._gates))
        self._add_product(4 * index + 3, layer.down, "inner", "delta")

    def _add_norm(self, index: int, weight: Tensor) -> None:
        self._norms["weight"][index] = weight.data_ptr()
        self._program.add(norm_kernel(), address_of(self._norms, index), _ROWS_WORTH_SHARING)

    def _add_head(self, head: Product) -> None:
        """The logits go to a new tensor each time, because callers keep them."""
        index = len(self._products) - 1

        def used() -> tuple[Tensor, Tensor]:
            return self.x[: len(self._logits)], self._logits

        add_product(self._program, self._products, index, head, self.x, self._logits, used)

    def _add_product(self, index: int, product: Product, source: str, goal: str) -> None:
        x, out = self._buffers[source], self._buffers[goal]

        def used() -> tuple[Tensor, Tensor]:
            rows = filled(self._rows)  # the buffers have that many, which saves the product a copy
            return x[:rows], out[:rows]

        add_product(self._program, self._products, index, product, x, out, used)


class _Turns:
    """Cosines and sines of all positions so far: table [positions, rotated] float32, first cosines, then sines."""

    def __init__(self, rotary: Any):
        self._rotary = rotary
        self.table = self._of(0, rounded_up(1))
        self.width = self.table.shape[1]

    def reserve(self, positions: int) -> None:
        """Append positions; those that are there keep their values, because cached keys were rotated by them."""
        if positions > (held := len(self.table)):
            self.table = torch.cat([self.table, self._of(held, rounded_up(positions))])

    def shrink(self) -> None:
        """Release all but the first positions."""
        self.table = self.table[: rounded_up(1)].clone()

    def _of(self, first: int, end: int) -> Tensor:
        return torch.cat(cosines_sines(self._rotary, first, end, torch.device("cpu")), dim=1)
