"""An assistant's layers as one program, for rows of all requests: they read the target's keys and write none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from drafters.heads.assistant.weights import AssistantWeights
from drafters.heads.stack import GrowingPool
from engine.core.batch import Batch, Int, Rows
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Attention, LayerKeys, has_pairs
from engine.kernels.layer.decoder_steps import attention_and_mlp
from engine.kernels.layer.program import LayerProgram
from engine.kernels.layer.weights import AttentionWeights
from engine.model.rotary import RotaryTables

_BLOCKS = 256  # of the pool initially; it grows


class ReadingRows(Rows):
    """Rows that have no slots of their own, since they write nothing."""

    @cached_property
    def slots(self) -> list[int]:
        return [0] * len(self)


class AssistantProgram:
    """Computes the states and logits of rows. pool: has a part for each of the target's layers that are read."""

    def __init__(self, weights: AssistantWeights):
        self.weights = weights
        pairs = has_pairs(torch.bfloat16)
        shapes = [KVShape(1, keys.kv_heads, keys.head_dim, torch.bfloat16, pairs) for keys in weights.keys]
        self.pool = GrowingPool(shapes, _BLOCKS, 0, torch.float32)
        self._rotary = RotaryTables(weights.rotary)
        self._program = self._program_for(1)

    def write(self, slots: Int, states: Tensor) -> None:
        """Write the target's keys and values to these slots. states: [slots, numbers], as a decoder gives them."""
        at, places = 0, torch.from_numpy(slots)
        for part, keys in zip(self.pool.parts, self.weights.keys, strict=True):
            width = keys.kv_heads * keys.head_dim
            both = states[:, at : at + 2 * width].unflatten(1, (2, keys.kv_heads, keys.head_dim))
            part.write(0, places, both[:, 0], both[:, 1])
            at += 2 * width

    @property
    def hidden_size(self) -> int:
        """The target's."""
        return int(self.weights.after.outputs)

    def step(self, before: Tensor, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Return logits [rows, tokens], and the states after the parts' tokens, [rows, hidden]. before: [rows, hidden],
        the states before them.
        """
        tokens = [token for rows in parts for token in rows.tokens]
        if self.weights.own is not None:
            self.weights.own.enter(tokens)
        embedded = self.weights.embed(torch.tensor(tokens))
        return self._run(torch.cat([embedded, before.to(torch.bfloat16)], dim=1), Batch(parts))

    def _run(self, entering: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        count = len(batch)
        self._rotary.reserve(batch.reach)
        if count > self._program.capacity or self._blocks != self.pool.blocks:
            self._program = self._program_for(max(self._program.capacity, 1 << (count - 1).bit_length()))
        program = self._program
        places, *_ = [attention.begin(batch) for attention in self._attentions]
        program.buffers["entering"][:count], program.residual[:count] = entering, 0
        program.begin(count, places.positions, places.slots, self._rotary.tables)
        program.run()
        return self.weights.head(program.buffers["x"][:count]), program.buffers["after"][:count].clone()

    def _program_for(self, capacity: int) -> LayerProgram:
        """Return the program for up to `capacity` rows of all blocks that the pool has now."""
        weights, self._blocks = self.weights, self.pool.blocks
        mixers = [layer.weights.mixer for layer in weights.layers]
        groups = []
        for layer, read in zip(weights.layers, weights.reads, strict=True):
            keys = weights.keys[read]
            groups.append((read, layer.products[0].outputs // keys.head_dim // keys.kv_heads))
        made = {
            (read, q_per_kv): Attention(self.pool.parts[read], q_per_kv, groups.count((read, q_per_kv)))
            for read, q_per_kv in dict.fromkeys(groups)
        }
        self._attentions = [*made.values()]
        hidden = weights.before.outputs
        program = LayerProgram(self._attentions, capacity, hidden, torch.bfloat16, len(weights.layers))
        program.buffer("entering", weights.before.inputs)
        program.product(weights.before, "entering", "delta", hidden)
        program.delta()
        for at, (layer, group) in enumerate(zip(weights.layers, groups, strict=True)):
            mixer, outputs = mixers[at], layer.products[0].outputs
            assert isinstance(mixer, AttentionWeights)
            program.begin_layer(layer.weights.input_norm)
            program.product(mixer.qkv, "x", queries := f"queries {outputs}", outputs)
            keys_of = LayerKeys(made[group], 0, weights.rules[at], groups[:at].count(group), own=False)
            attention_and_mlp(program, layer.weights, keys_of, queries)
        program.norm(weights.norm)
        program.product(weights.after, "x", "after", weights.after.outputs)
        return program
