"""A lean forward for decoders of the common structure: RMSNorms before or after attention and MLP, rotary positions,
grouped queries, a gated MLP or experts.

It takes the weights of a loaded stock model. Whether a model has this structure is read from its modules, never from
its family's name (`engine.model.decoder_layer`), and confirmed by comparing logits with the stock forward's
(`engine.model.forward_choice`); any other model keeps the stock forward. All layers are one program
(`engine.kernels.layer.program`): where the products are our own too, a forward is one call instead of the stock
forward's 1,500.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.config import Activations
from engine.core.batch import Batch
from engine.kernels.attention.attention import Attention, Rule
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.row_kernels import CAP, cap_kernel
from engine.kernels.layer.weights import ExpertMlp, GatedMlp
from engine.kernels.quant.pack import panels_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.simd import LANES
from engine.kernels.threads import address_of
from engine.model.decoder_layer import Layer, Matrices, OtherStructure, joined, norm_of, only
from engine.model.kv_pool import KVPool
from engine.model.rotary import RotaryTables


class LeanDecoder:
    """Runs batches. rules: each layer's attention rule, as the stock forward passed it.

    matrices: where the model's matrices are read. activations: how those in blocks take their rows.
    """

    sizes = (1,)

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        q_per_kv: int,
        rules: dict[int, Rule],
        matrices: Matrices,
        activations: Activations = "bfloat16",
    ):
        base, config = getattr(model, "model", None), model.config.get_text_config()
        if base is None or not isinstance(getattr(model, "lm_head", None), nn.Linear):
            raise OtherStructure("no model with lm_head")
        only(model, {"model", "lm_head"})
        only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
        self._rotary = RotaryTables(base.rotary_emb, getattr(config, "layer_types", None))
        shape = pool.shape
        self.layers = [
            Layer(layer, matrices, activations, shape.head_dim, self._rotary.width, self._rotary.of_layer(index))
            for index, layer in enumerate(base.layers)
        ]
        self.embedding_scale = _embedding_scale(base)
        self.norm = norm_of(base.norm)
        self.head = joined(matrices, model, ("lm_head",), activations=activations)
        self.embedding = self._embedding(base.embed_tokens.weight, model.lm_head.weight, matrices)
        self._cap = _Cap(config)
        (self.vocab_size, self.hidden), self.dtype = base.embed_tokens.weight.shape, base.embed_tokens.weight.dtype
        self.attention = Attention(pool, q_per_kv)
        self._check_sizes()
        self.take_rules(rules)

    def take_rules(self, rules: dict[int, Rule]) -> None:
        """Attend by these rules from now on."""
        self.rules = [rules[i] for i in range(len(self.layers))]
        self._program = self._program_for(1)

    def take_pool(self, pool: KVPool) -> None:
        """Keep keys and values in that pool from now on."""
        self.attention = Attention(pool, self.attention.q_per_kv)
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
        tiles = self.embedding.tiles if isinstance(self.embedding, TiledMatrix) else self.embedding
        shared = self.head.matmul is not None and self.embedding in self.head.matmul.tiled
        embedding: int = 0 if shared else tiles.nbytes
        return embedding + self.matrix_bytes + sum(layer.idle_bytes for layer in self.layers)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that a forward of one row reads."""
        layers = [product for layer in self.layers for product in layer.products]
        return sum(product.bytes for product in [*layers, self.head])

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """See `engine.model.forward.Forward`."""
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
        program.begin(rows, places.positions, places.slots, self._rotary.tables, places.tokens, count, chosen)
        kept = [*dict.fromkeys(feature_layers)]  # with a shallow target, a head may request a layer twice
        features = program.keep(kept)
        if whole and 0 < wanted < rows:
            program.run()
            logits = self.head(program.buffers["x"].index_select(0, torch.from_numpy(batch.chosen)))
        else:
            logits = program.run_to_head(wanted)
        self._cap(logits)
        if features is not None and last in kept:
            features[:, kept.index(last)] = program.buffers["x"][:rows]
        if features is not None and len(kept) < len(feature_layers):
            features = features[:, [kept.index(layer) for layer in feature_layers]]
        return logits, features

    def _embedding(self, weight: Tensor, head: Tensor, matrices: Matrices) -> Tensor | TiledMatrix:
        """What tokens are looked up in: the output matrix itself, if it is the same in a file's blocks."""
        tiled = [] if self.head.matmul is None else self.head.matmul.tiled
        if weight is head and weight.is_meta and len(tiled) == 1:
            return tiled[0]
        found = matrices.matrix(weight)
        return TiledMatrix(panels_of(found)) if isinstance(found, StoredMatrix) else found.detach().contiguous()

    def forget_far(self) -> None:
        """Release the memory that far positions of the trial at load took."""
        self._rotary.shrink()

    def _program_for(self, rows: int) -> LayerProgram:
        """The program of all layers for up to `rows` rows."""
        program = LayerProgram(self.attention, rows, self.hidden, self.dtype, len(self.layers))
        program.embed(self.embedding, self.embedding_scale)
        for index, (layer, rule) in enumerate(zip(self.layers, self.rules, strict=True)):
            program.norm(layer.weights.input_norm)
            program.product(layer.weights.qkv, "x", "qkv", layer.products[0].outputs)
            program.attention_and_mlp(index, layer.weights, rule)
        program.norm(self.norm)
        program.head(self.head, self.head.outputs)
        return program

    def _check_sizes(self) -> None:
        shape, q_per_kv = self.attention.pool.shape, self.attention.q_per_kv
        made = (q_per_kv + 2) * shape.kv_heads * shape.head_dim
        mlps = [layer.weights.mlp for layer in self.layers]
        inner = {mlp.inner for mlp in mlps if isinstance(mlp, GatedMlp)}
        experts = {(mlp.inner, mlp.top_k, len(mlp.gate_up)) for mlp in mlps if isinstance(mlp, ExpertMlp)}
        if any(layer.products[0].outputs != made for layer in self.layers) or len(inner) > 1 or len(experts) > 1:
            raise OtherStructure("layers of different sizes")
        if any(size % LANES for size in (self.hidden, *inner)) or self._rotary.width > shape.head_dim:
            raise OtherStructure("sizes that 16 does not divide")
        for layer in self.layers:
            for norm, heads in ((layer.weights.query_norm, q_per_kv), (layer.weights.key_norm, 1)):
                whole = heads * shape.kv_heads * shape.head_dim
                if norm is not None and len(norm.weight) not in (shape.head_dim, whole if whole % LANES == 0 else 0):
                    raise OtherStructure("norms of neither one head nor all")


class _Cap:
    """What the configuration does to logits: they are divided, or capped by tanh."""

    def __init__(self, config: Any):
        self._work = np.zeros(1, CAP)
        scale, cap = getattr(config, "logits_scaling", None), getattr(config, "final_logit_softcapping", None)
        self._work["scale"], self._work["cap"] = 1 / (scale or 1.0), cap or 0.0
        self._needed = bool(cap) or (scale or 1.0) != 1.0

    def __call__(self, logits: Tensor) -> None:
        """logits: [rows, vocab], changed in place."""
        if self._needed and len(logits):
            self._work["x"], self._work["width"] = logits.data_ptr(), logits.itemsize
            self._work["rows"], self._work["columns"] = logits.shape
            cap_kernel()(address_of(self._work), logits.shape[1] // LANES)


def _embedding_scale(base: Any) -> float:
    """By which the model multiplies the embeddings of its tokens."""
    embed = base.embed_tokens
    scale = torch.tensor(float(getattr(embed, "scalar_embed_scale", 1.0))).to(embed.weight.dtype)
    if type(embed) is not nn.Embedding and not hasattr(embed, "scalar_embed_scale"):
        raise OtherStructure(f"the embedding {type(embed).__name__}")
    return float(scale) * float(getattr(base, "embedding_multiplier", 1.0))
