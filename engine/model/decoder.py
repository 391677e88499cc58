"""A lean forward for decoders of the common structure: RMSNorms before or after attention and MLP, rotary positions,
grouped queries, a gated MLP or experts.

Whether a stock model has this structure is read from its modules (`engine.model.reader`), and confirmed by comparing
logits with the stock forward's (`engine.model.trial.forward_choice`); any other model keeps the stock forward. A
decoder is built from the structure and the parameters alone. All layers are one program
(`engine.kernels.layer.program`): where the products are our own too, a forward is one call instead of the stock
forward's 1,500.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.config import Activations
from engine.core.batch import Batch
from engine.core.errors import StateLost, first_line
from engine.core.state_shape import StateShape
from engine.kernels.attention.attention import Attention, Rule
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.row_kernels import CAP, cap_kernel
from engine.kernels.layer.weights import AttentionWeights, ExpertMlp, GatedMlp
from engine.kernels.quant.pack import panels_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.simd import LANES
from engine.kernels.state.walk import LayerPlace, StateLayer, Walk
from engine.kernels.threads import address_of
from engine.model.decoder_layer import Layer, Parameters, joined, made_norm
from engine.model.kv_pool import KVPool
from engine.model.rotary import RotaryTables
from engine.model.state_pool import StatePool
from engine.model.structure import DecoderStructure, OtherStructure


class LeanDecoder:
    """Runs batches. rules: each layer's attention rule, as the stock forward passed it.

    activations: how matrices in blocks take their rows.
    """

    sizes = (1,)

    def __init__(
        self,
        structure: DecoderStructure,
        pool: KVPool,
        rules: dict[int, Rule],
        parameters: Parameters,
        activations: Activations = "bfloat16",
    ):
        self._rotary = RotaryTables(structure.rotary)
        self.layers = [Layer(layer, parameters, activations, pool.shape.dtype) for layer in structure.layers]
        self.embedding_scale = structure.embedding_scale
        self.norm = made_norm(structure.norm, parameters.vector(structure.norm.weight))
        self.head = joined(structure.head, parameters, activations)
        self.embedding = self._embedding(structure, parameters)
        self._cap = _Cap(structure)
        self.vocab_size, self.hidden, self.dtype = structure.vocab_size, structure.hidden, pool.shape.dtype
        self.attention, self.states = Attention(pool, structure.heads // structure.kv_heads), pool.layer_states
        self._check_sizes()
        self._walk = self._new_walk()
        self.take_rules(rules)

    def take_rules(self, rules: dict[int, Rule]) -> None:
        """Attend by these rules from now on."""
        self.rules = [rules[i] for i, layer in enumerate(self.layers) if layer.attends]
        self._program = self._program_for(1)

    def take_pool(self, pool: KVPool) -> None:
        """Keep keys and values in that pool from now on."""
        self.attention, self.states = Attention(pool, self.attention.q_per_kv), pool.layer_states
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
        out = self._new_out(batch, whole)
        logits = self._run(batch, out) if self.states is None else self._run_walked(batch, out, self.states)
        self._cap(logits)
        if features is not None and last in kept:
            features[:, kept.index(last)] = program.buffers["x"][:rows]
        if features is not None and len(kept) < len(feature_layers):
            features = features[:, [kept.index(layer) for layer in feature_layers]]
        return logits, features

    def _new_out(self, batch: Batch, whole: bool) -> Tensor:
        """Allocate the logits of the rows wanted; of none, if they are chosen once the last norm has all (`whole`)."""
        chosen_later = whole and 0 < batch.wanted < len(batch)
        return self._program.new_out(0 if chosen_later else batch.wanted)

    def _run(self, batch: Batch, out: Tensor) -> Tensor:
        """The logits of the rows wanted, in `out` if it has as many rows."""
        program = self._program
        if len(out) == batch.wanted:
            return program.run_to_head(out)
        program.run()
        return self.head(program.buffers["x"].index_select(0, torch.from_numpy(batch.chosen)))

    def _run_walked(self, batch: Batch, out: Tensor, states: StatePool) -> Tensor:
        """The same where layers have a state. Raises StateLost if it is interrupted; until it runs nothing is lost."""
        assert self._walk is not None
        requests = [segment.cache.state for segment in batch.segments]
        rows = [state.rows(segment) for state, segment in zip(requests, batch.segments, strict=True)]
        self._walk.begin(rows, *states.addresses)
        try:
            logits = self._run(batch, out)
        except Exception as error:  # some layers may have replayed rows and others not
            raise StateLost(f"a forward over layers with a state was interrupted: {first_line(error)}") from error
        for state in requests:
            state.end()
        return logits

    def _embedding(self, structure: DecoderStructure, parameters: Parameters) -> Tensor | TiledMatrix:
        """What tokens are looked up in: the output matrix itself, if it is the same in a file's blocks."""
        tiled = [] if self.head.matmul is None else self.head.matmul.tiled
        if structure.tied and len(tiled) == 1:
            return tiled[0]
        found = parameters.matrix(structure.embedding)
        return TiledMatrix(panels_of(found)) if isinstance(found, StoredMatrix) else found.detach().contiguous()

    def forget_far(self) -> None:
        """Release the memory that far positions of the trial at load took."""
        self._rotary.shrink()

    def _program_for(self, rows: int) -> LayerProgram:
        """The program of all layers for up to `rows` rows."""
        program = LayerProgram(self.attention, rows, self.hidden, self.dtype, len(self.layers))
        program.embed(self.embedding, self.embedding_scale)
        rules, places = iter(enumerate(self.rules)), self._places()
        for layer in self.layers:
            mixer = layer.weights.mixer
            program.norm(layer.weights.input_norm)
            if isinstance(mixer, AttentionWeights):
                index, rule = next(rules)
                program.product(mixer.qkv, "x", "qkv", layer.products[0].outputs)
                program.attention_and_mlp(index, layer.weights, rule)
            else:
                program.state_and_mlp(layer.weights, next(places))
        program.norm(self.norm)
        program.head(self.head, self.head.outputs)
        return program

    @property
    def _with_state(self) -> list[StateLayer]:
        """What mixes rows in the layers with a state."""
        mixers = [layer.weights.mixer for layer in self.layers]
        return [mixer for mixer in mixers if not isinstance(mixer, AttentionWeights)]

    def _new_walk(self) -> Walk | None:
        """What layers with a state are told of a forward; None if there are none. Raises OtherStructure if the pool
        keeps other states than these layers'.
        """
        layers = self._with_state
        shape = StateShape(tuple(one.state_bytes for one in layers), tuple(one.row_bytes for one in layers))
        if (self.states.shape if self.states is not None else StateShape((), ())) != shape:
            raise OtherStructure("a pool of other states")
        if not layers:
            return None
        return Walk(shape, max(one.scratch_bytes for one in layers), max(one.tile_bytes for one in layers))

    def _places(self) -> Iterator[LayerPlace]:
        """Where the part of each layer with a state is."""
        if self._walk is not None:
            shape = self._walk.shape
            for state, row in zip(shape.state_offsets[:-1], shape.row_offsets[:-1], strict=True):
                yield LayerPlace(state, row, self._walk.address)

    def _check_sizes(self) -> None:
        shape, q_per_kv = self.attention.pool.shape, self.attention.q_per_kv
        queries, keys = q_per_kv * shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attending = [mixer for layer in self.layers if isinstance(mixer := layer.weights.mixer, AttentionWeights)]
        made = {(1 + mixer.gated) * queries + 2 * keys for mixer in attending}
        gates = {queries for mixer in attending if mixer.gated}
        mlps = [layer.weights.mlp for layer in self.layers]
        inner = {mlp.inner for mlp in mlps if isinstance(mlp, GatedMlp)}
        experts = {(mlp.inner, mlp.top_k, len(mlp.gate_up)) for mlp in mlps if isinstance(mlp, ExpertMlp)}
        shared = {mlp.shared.inner for mlp in mlps if isinstance(mlp, ExpertMlp) and mlp.shared is not None}
        outputs = {layer.products[0].outputs for layer in self.layers if layer.attends}
        if outputs != made or any(len(sizes) > 1 for sizes in (made, inner, experts, shared)):
            raise OtherStructure("layers of different sizes")
        if any(size % LANES for size in (self.hidden, *inner, *shared, *gates)) or self._rotary.width > shape.head_dim:
            raise OtherStructure("sizes that 16 does not divide")
        for mixer in attending:
            for norm, heads in ((mixer.query_norm, q_per_kv), (mixer.key_norm, 1)):
                whole = heads * shape.kv_heads * shape.head_dim
                if norm is not None and len(norm.weight) not in (shape.head_dim, whole if whole % LANES == 0 else 0):
                    raise OtherStructure("norms of neither one head nor all")


class _Cap:
    """What the structure does to logits: they are divided, or capped by tanh."""

    def __init__(self, structure: DecoderStructure):
        self._work = np.zeros(1, CAP)
        divisor, cap = structure.logit_divisor, structure.logit_cap
        self._work["scale"], self._work["cap"] = 1 / divisor, cap
        self._needed = cap > 0 or divisor != 1.0

    def __call__(self, logits: Tensor) -> None:
        """logits: [rows, vocab], changed in place."""
        if self._needed and len(logits):
            self._work["x"], self._work["width"] = logits.data_ptr(), logits.itemsize
            self._work["rows"], self._work["columns"] = logits.shape
            cap_kernel()(address_of(self._work), logits.shape[1] // LANES)
