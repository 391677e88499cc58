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
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.config import Activations
from engine.core.batch import Batch
from engine.core.errors import StateLost, first_line
from engine.core.state_shape import StateShape
from engine.kernels.attention.attention import Attention, LayerKeys, Rule
from engine.kernels.gemm.product import Product
from engine.kernels.layer.decoder_steps import attention_and_mlp, mlp_alone, state_and_mlp
from engine.kernels.layer.latent_steps import latent_rows
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.row_kernels import CAP, cap_kernel
from engine.kernels.layer.weights import AttentionWeights, ExpertMlp, GatedMlp, PerLayerInputs
from engine.kernels.quant.pack import panels_of
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.quant.tiled import TiledMatrix
from engine.kernels.simd import LANES
from engine.kernels.state.walk import LayerPlace, StateLayer, Walk
from engine.kernels.threads import address_of
from engine.model.decoder_layer import Layer, Parameters, joined, norm_from
from engine.model.kv_pool import KVPool
from engine.model.rotary import RotaryTables
from engine.model.state_pool import StatePool
from engine.model.structure import DecoderStructure, KeyPlace, OtherStructure


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
        self.structure, self._rotary = structure, RotaryTables(structure.rotary)
        self.dtype = pool.parts[0].shape.dtype
        self.layers = [Layer(layer, parameters, activations, self.dtype) for layer in structure.layers]
        self.embedding_scale = structure.embedding_scale
        self.norm = norm_from(structure.norm, parameters)
        self.head = joined(structure.head, parameters, activations)
        self.embedding = self._embedding(structure, parameters)
        self.layer_inputs = self._layer_inputs(structure, parameters, activations)
        self._cap = _Cap(structure)
        self.vocab_size, self.hidden = structure.vocab_size, structure.hidden
        self._check_sizes()
        self._attend_in(pool)
        self._walk = self._new_walk()
        self.take_rules(rules)

    def take_rules(self, rules: dict[int, Rule]) -> None:
        """Attend by these rules from now on."""
        attending = self.structure.attending.items()
        self.rules = [replace(rules[at], scale=rules[at].scale * of.score_scale) for at, of in attending]
        self._program = self._program_for(1)

    def take_pool(self, pool: KVPool) -> None:
        """Keep keys and values in that pool from now on."""
        self._attend_in(pool)
        self._program = self._program_for(1)

    def _attend_in(self, pool: KVPool) -> None:
        """Make an attention for each part of the pool and each number of queries that share keys, and choose one for
        each layer.
        """
        self.states, self._keys = pool.layer_states, list[tuple[KeyPlace, Attention, int]]()
        self._parts = pool.parts
        places, mixers = self.structure.key_places, self.structure.attending.values()
        groups = [(place.part, of.heads // of.kv_heads) for place, of in zip(places, mixers, strict=True)]
        made = {
            (part, q_per_kv): Attention(pool.parts[part], q_per_kv, groups.count((part, q_per_kv)))
            for part, q_per_kv in dict.fromkeys(groups)
        }
        self.attentions = [*made.values()] or [
            Attention(pool.parts[0], 1)
        ]  # which lays out a batch, if no layer attends
        for at, (place, group) in enumerate(zip(places, groups, strict=True)):
            self._keys.append((place, made[group], groups[:at].count(group)))

    @property
    def activations(self) -> Activations:
        """int8 if any product rounds its rows to 8 bits."""
        products = [self.head, *self._products]
        return "int8" if any(product.activations == "int8" for product in products) else "bfloat16"

    @property
    def exact(self) -> bool:
        """Whether every product gives a row the same bits in any batch."""
        return all(product.rows is not None for product in [*self._products, self.head])

    @property
    def _products(self) -> list[Product]:
        """All but the output matrix."""
        first = [] if self.layer_inputs is None else [self.layer_inputs[0]]
        return [*first, *(product for layer in self.layers for product in layer.products)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the embeddings and all matrices."""
        shared = self.head.matmul is not None and self.embedding in self.head.matmul.tiled
        embedding: int = 0 if shared else _bytes_of(self.embedding)
        embedding += 0 if self.layer_inputs is None else _bytes_of(self.layer_inputs[1].embedding)
        return embedding + self.matrix_bytes + sum(layer.idle_bytes for layer in self.layers)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices that a forward of one row reads."""
        return sum(product.bytes for product in [*self._products, self.head])

    def __call__(self, batch: Batch, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """See `engine.model.forward.Forward`."""
        rows, last, vocabulary = len(batch), len(self.layers), batch.vocabulary
        if vocabulary.start < 0 or vocabulary.stop > self.vocab_size:  # a kernel would read beyond the embedding
            raise IndexError(f"tokens are numbered from 0 to {self.vocab_size - 1}")
        self._rotary.reserve(batch.reach)
        places, *_ = [attention.begin(batch) for attention in self.attentions]
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
        if features is not None and max(kept) > last:
            pieces = self._key_states(torch.from_numpy(batch.slots)).to(features.dtype)
            for column, layer in enumerate(kept):
                if layer > last:
                    features[:, column] = pieces[:, layer - last - 1]
        if features is not None and len(kept) < len(feature_layers):
            features = features[:, [kept.index(layer) for layer in feature_layers]]
        return logits, features

    def _key_states(self, slots: Tensor) -> Tensor:
        """Return [rows, pieces, hidden]: the rows' keys and values of the structure's `last_keys`, as they lie in the
        pool.
        """
        both = [self._parts[place.part].read(place.layer, slots) for place in self.structure.last_keys]
        numbers = torch.cat([entry.flatten(1) for entries in both for entry in entries], dim=1)
        return pad(numbers, (0, -numbers.shape[1] % self.hidden)).unflatten(1, (-1, self.hidden))

    def _new_out(self, batch: Batch, whole: bool) -> Tensor:
        """Allocate the logits of the rows wanted; of none, if they are chosen once the last norm has all (`whole`)."""
        chosen_later = whole and 0 < batch.wanted < len(batch)
        return self._program.new_out(0 if chosen_later else batch.wanted)

    def _run(self, batch: Batch, out: Tensor) -> Tensor:
        """Return the logits of the rows wanted, in `out` if it has as many rows."""
        program = self._program
        if len(out) == batch.wanted:
            return program.run_to_head(out)
        program.run()
        return self.head(program.buffers["x"].index_select(0, torch.from_numpy(batch.chosen)))

    def _run_walked(self, batch: Batch, out: Tensor, states: StatePool) -> Tensor:
        """Run the layers one by one, for models whose layers have a state. Raises StateLost if it is interrupted;
        nothing is lost before it runs.
        """
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
        """Return the matrix in which tokens are looked up: the output matrix, if the file stores one for both."""
        tiled = [] if self.head.matmul is None else self.head.matmul.tiled
        if structure.tied and len(tiled) == 1:
            return tiled[0]
        return _looked_up(parameters.matrix(structure.embedding))

    @staticmethod
    def _layer_inputs(
        structure: DecoderStructure, parameters: Parameters, activations: Activations
    ) -> tuple[Product, PerLayerInputs] | None:
        """Return the product that makes the inputs of single layers and their description; None if the layers get the
        residual alone.
        """
        if (found := structure.layer_inputs) is None:
            return None
        project = joined(found.project, parameters, activations)
        norm, embedding = norm_from(found.norm, parameters), _looked_up(parameters.matrix(found.embedding))
        inputs = PerLayerInputs(project, norm, embedding, found.embedding_scale, found.scale)
        return project, inputs

    def forget_far(self) -> None:
        """Release the memory that far positions of the trial at load took."""
        self._rotary.shrink()

    def _program_for(self, rows: int) -> LayerProgram:
        """Return the program of all layers for up to `rows` rows."""
        program = LayerProgram(self.attentions, rows, self.hidden, self.dtype, len(self.layers))
        program.embed(self.embedding, self.embedding_scale)
        if self.layer_inputs is not None:
            program.layer_inputs(self.layer_inputs[1], self.layer_inputs[0].outputs)
        keys, places = zip(self._keys, self.rules, strict=True), self._places()
        for layer in self.layers:
            mixer = layer.weights.mixer
            program.begin_layer(layer.weights.input_norm)
            if isinstance(mixer, AttentionWeights):
                (place, attention, use), rule = next(keys)
                outputs = layer.products[0].outputs
                of = LayerKeys(attention, place.layer, rule, use, place.own)
                if mixer.latent is None:
                    program.product(mixer.qkv, "x", made := f"qkv {outputs}", outputs)
                else:
                    made = latent_rows(program, mixer, of)
                beside = None if layer.weights.beside is None else next(places)
                attention_and_mlp(program, layer.weights, of, made, beside)
            elif mixer is None:
                mlp_alone(program, layer.weights)
            else:
                state_and_mlp(program, layer.weights, next(places))
        program.norm(self.norm)
        program.head(self.head, self.head.outputs)
        return program

    @property
    def _with_state(self) -> list[StateLayer]:
        """What mixes rows and has a state, in the order of layers."""
        mixers = [mixer for layer in self.layers for mixer in (layer.weights.mixer, layer.weights.beside)]
        return [mixer for mixer in mixers if mixer is not None and not isinstance(mixer, AttentionWeights)]

    def _new_walk(self) -> Walk | None:
        """Return what layers with a state are told of a forward; None if there are no such layers. Raises
        OtherStructure if the pool keeps states of another shape.
        """
        layers = self._with_state
        shape = StateShape(tuple(one.state_bytes for one in layers), tuple(one.row_bytes for one in layers))
        if (self.states.shape if self.states is not None else StateShape((), ())) != shape:
            raise OtherStructure("a pool of other states")
        if not layers:
            return None
        return Walk(shape, max(one.scratch_bytes for one in layers), max(one.tile_bytes for one in layers))

    def _places(self) -> Iterator[LayerPlace]:
        """Yield where each layer with a state keeps its part."""
        if self._walk is not None:
            shape = self._walk.shape
            for state, row in zip(shape.state_offsets[:-1], shape.row_offsets[:-1], strict=True):
                yield LayerPlace(state, row, self._walk.address)

    def _check_sizes(self) -> None:
        attending, gates = self.structure.attending, set[int]()
        for at, mixer in attending.items():
            queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
            written = 0 if mixer.keys_of is not None else keys if mixer.values_are_keys else 2 * keys
            gates |= {queries} if mixer.gated or mixer.sub_norm is not None else set()
            gates |= {(1 + mixer.gated) * queries + written} if mixer.clip else set()
            if mixer.latent is None and self.layers[at].products[0].outputs != (1 + mixer.gated) * queries + written:
                raise OtherStructure("layers of different sizes")
            if self.structure.rotary[mixer.rotary_table].dims > mixer.head_dim:
                raise OtherStructure("rotary positions of more dimensions than a head has")
        mlps = [layer.weights.mlp for layer in self.layers]
        inner = {mlp.inner for mlp in mlps if isinstance(mlp, GatedMlp)}
        experts = {(mlp.inner, mlp.top_k, len(mlp.gate_up)) for mlp in mlps if isinstance(mlp, ExpertMlp)}
        shared = {mlp.shared.inner for mlp in mlps if isinstance(mlp, ExpertMlp) and mlp.shared is not None}
        if any(len(sizes) > 1 for sizes in (experts, shared)):
            raise OtherStructure("layers of different sizes")
        if any(size % LANES for size in (self.hidden, *inner, *shared, *gates)):
            raise OtherStructure("sizes that 16 does not divide")
        for at, of in attending.items():
            weights = self.layers[at].weights.mixer
            assert isinstance(weights, AttentionWeights)
            for norm, heads in ((weights.query_norm, of.heads), (weights.key_norm, of.kv_heads)):
                whole = heads * of.head_dim
                if norm is not None and len(norm.weight) not in (of.head_dim, whole if whole % LANES == 0 else 0):
                    raise OtherStructure("norms of neither one head nor all")


def _looked_up(matrix: Tensor | StoredMatrix) -> Tensor | TiledMatrix:
    """Return the matrix in a form from which single rows are read."""
    return TiledMatrix(panels_of(matrix)) if isinstance(matrix, StoredMatrix) else matrix.detach().contiguous()


def _bytes_of(embedding: Tensor | TiledMatrix) -> int:
    found: int = (embedding.tiles if isinstance(embedding, TiledMatrix) else embedding).nbytes
    return found


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
