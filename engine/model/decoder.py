"""A lean forward for the common structure: pre-norm, RMSNorm, rotary positions, grouped queries, gated SiLU.

It takes the weights of a loaded stock model. Whether a model has this structure is read from its modules, never from
its family's name, and confirmed by comparing logits with the stock forward's (`engine.model.target`); any other model
keeps the stock forward. All layers are one program (`engine.kernels.layer.program`): where the products are our own
too, a forward is one call instead of the stock forward's 1,500.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import Activations
from engine.core.batch import Batch
from engine.kernels.attention.attention import Attention, Rule
from engine.kernels.layer.program import LayerProgram
from engine.kernels.simd import LANES
from engine.model.decoder_layer import Layer, Matrices, OtherStructure, joined, norm_of, only
from engine.model.kv_pool import KVPool
from engine.model.rotary import cosines_sines, rounded_up


class LeanDecoder:
    """Runs batches. rules: each layer's attention rule, as the stock forward passed it.

    quantised: matrices that are known in fewer bits, by the address of the weight that each stands for. activations:
    how these take their rows.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        q_per_kv: int,
        rules: dict[int, Rule],
        quantised: Matrices,
        activations: Activations = "bfloat16",
    ):
        base = getattr(model, "model", None)
        if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
            raise OtherStructure
        only(model, {"model", "lm_head"})
        only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        self._rotary = _RotaryTable(base.rotary_emb)
        self.layers = [Layer(layer, quantised, self._rotary.width, activations) for layer in base.layers]
        self.rules = [rules[i] for i in range(len(self.layers))]
        self.embedding: Tensor = base.embed_tokens.weight.detach().contiguous()
        self.norm = norm_of(base.norm)
        self.head = joined(quantised, activations, model, ("lm_head",))
        (self.vocab_size, self.hidden), self.dtype = self.embedding.shape, self.embedding.dtype
        self.attention = Attention(pool, q_per_kv)
        self._check_sizes()
        self._program = self._program_for(1)

    @property
    def activations(self) -> Activations:
        """int8 if any product rounds its rows to 8 bits."""
        products = [self.head, *(product for layer in self.layers for product in layer.products)]
        return "int8" if any(product.activations == "int8" for product in products) else "bfloat16"

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
        self._rotary.reserve(batch.reach)
        places = self.attention.begin(batch)
        if rows > self._program.capacity:
            self._program = self._program_for(1 << (rows - 1).bit_length())
        program, wanted = self._program, batch.wanted
        whole = wanted == rows or last in feature_layers
        count, chosen = (rows, 0) if whole else (wanted, places.chosen)
        program.begin(rows, places.positions, places.slots, self._rotary.table, places.tokens, count, chosen)
        kept = [*dict.fromkeys(feature_layers)]  # with a shallow target, a head may request a layer twice
        features = program.keep(kept)
        if whole and 0 < wanted < rows:
            program.run()
            logits = self.head(program.buffers["x"].index_select(0, torch.from_numpy(batch.chosen)))
        else:
            logits = program.run_to_head(wanted)
        if features is not None and last in kept:
            features[:, kept.index(last)] = program.buffers["x"][:rows]
        if features is not None and len(kept) < len(feature_layers):
            features = features[:, [kept.index(layer) for layer in feature_layers]]
        return logits, features

    def forget_far(self) -> None:
        """Release the memory that far positions of the trial at load took."""
        self._rotary.shrink()

    def _program_for(self, rows: int) -> LayerProgram:
        """The program of all layers for up to `rows` rows."""
        program = LayerProgram(self.attention, rows, self.hidden, self.dtype, len(self.layers))
        program.embed(self.embedding)
        for index, (layer, rule) in enumerate(zip(self.layers, self.rules, strict=True)):
            program.norm(layer.weights.input_norm)
            program.product(layer.weights.qkv, "x", "qkv", layer.products[0].outputs)
            program.attention_and_mlp(index, layer.weights, rule)
        program.norm(self.norm)
        program.head(self.head, self.head.outputs)
        return program

    def _check_sizes(self) -> None:
        shape, q_per_kv = self.attention.pool.shape, self.attention.groups
        made = (q_per_kv + 2) * shape.kv_heads * shape.head_dim
        inner = self.layers[0].weights.inner
        if any(layer.products[0].outputs != made or layer.weights.inner != inner for layer in self.layers):
            raise OtherStructure
        if self.hidden % LANES or inner % LANES or self._rotary.width > shape.head_dim:
            raise OtherStructure


class _RotaryTable:
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
