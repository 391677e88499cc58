"""One-pass heads: a block of tokens from one forward. DFlash (arXiv 2602.06036), JetSpec (arXiv 2606.18394), DSpark
(deepseek-ai/DeepSpec), and Talon's own block head, which is DSpark's with a draft vocabulary, a causal block and known
prefixes.

A few Transformer layers over a block: row 0 holds the last committed token, the others the mask embedding. Each layer
attends to the block and to the *context*: the target's hidden states, concatenated and fused by `fc` and `hidden_norm`,
through that layer's own key and value projections. Talon's rows also start from the last context vector (`entry` maps
the token's embedding and this vector); in the published layouts only attention supplies it. Embeddings and output
matrix are the target's unless the file has its own (for DSpark it must).

Which token a row predicts: DFlash and JetSpec fill in the masks, so row r >= 1 predicts the r-th token from the root,
and row 0 nothing (unless `dflash_config.draft_shift` says otherwise). DSpark's row r predicts the token after it.

The *link* (DSpark's Markov head) adds W2 W1[token before] to a row's logits, or W2 (gate * W1[token before]) with
gate = sigmoid(gate_proj [row; W1[token before]]): the branches of a tree then differ although they share the rows.

DFlash 2 (vLLM's `qwen3_dflash2`) has convolutions around attention and MLP (`convolution`), and a selector among each
row's likeliest tokens, which is a link with the gate H row (`markov_link.selector`). DSpine's rows tell the next ones
what they predict (`spine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.growth.policies import Dynamic, Policy, Static
from drafters.heads.head import Head
from drafters.heads.layers import (
    DecoderLayer,
    HeadCache,
    Linear,
    RMSNorm,
    draft_dtype,
    llama_config,
    qkv_weights,
    small_dtype,
)
from drafters.heads.matrices import HeadTensors, last_outputs, rows_of, some_of
from drafters.heads.new_stack import AnyStack, new_stack
from drafters.heads.one_pass.block_options import BlockOptions
from drafters.heads.one_pass.context import ContextReader
from drafters.heads.one_pass.convolution import Convolutions
from drafters.heads.one_pass.markov_link import Link, markov_link, selector
from drafters.heads.one_pass.spine import Spine
from drafters.heads.stack import Stack, StackLayer, StackSpec
from drafters.heads.top import Floats, Integers
from engine.kernels.simd import LANES

if TYPE_CHECKING:
    from drafters.heads.cuda_stack import CudaReader

UNKNOWN = -1
"""Stands in the place of a token that a block is to predict."""
CANDIDATES = 128
"""Candidates of a row, by the row alone; a link often lifts one that is far down."""


class BlockLayer:
    """One layer: queries, keys and values of the block's rows, keys and values of the context. around: the
    convolutions of DFlash 2.
    """

    def __init__(self, config: Any, tensors: HeadTensors, checkpoint: Checkpoint, options: BlockOptions):
        """Make the layer. tensors: of the layer."""
        device, dtype = tensors.joined.device, tensors.joined.dtype
        weight, bias = qkv_weights(config, tensors, config.hidden_size)
        self.input_norm = RMSNorm(tensors.vector("input_layernorm.weight", config.hidden_size), config.rms_norm_eps)
        self.decoder = DecoderLayer(config, tensors, device, dtype)
        kv = 2 * self.decoder.kv_heads * self.decoder.head_dim
        self.qkv = Linear(weight, bias)
        self.kv = Linear(last_outputs(weight, 2, kv), None if bias is None else bias[-kv:])
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        if all(checkpoint.has(f"{tensors.prefix}{name}") for name in names):
            norms = [RMSNorm(tensors.vector(name, self.decoder.head_dim), config.rms_norm_eps) for name in names]
            self.decoder.query_norm, self.decoder.key_norm = norms
        self.around: Convolutions | None = None
        if options.flash_2 is not None:
            self.around = Convolutions(tensors, config.hidden_size, options.flash_2, options.size)

    def __call__(self, x: Tensor, positions: Tensor, cache: HeadCache, at: int, mask: Tensor) -> Tensor:
        decoder, normed = self.decoder, self.input_norm(x)
        if self.around is None:
            return decoder(self.qkv(normed), x, positions, cache, at, mask)

        def attended(entered: Tensor) -> Tensor:
            return decoder.attended(self.qkv(entered), positions, cache, at, mask)

        x = x + self.around.attention(normed, attended)
        return x + self.around.mlp(decoder.norm(x), decoder.mlp)

    def read(self, context: Tensor, positions: Tensor, cache: HeadCache, at: int) -> None:
        """Write the context's keys and values, [n, hidden] at `positions`, to the slots from `at` on."""
        cache.write(*self.decoder.keys_values(self.kv(context), positions), at)


class Confidence:
    """How much of the target's probability a row's own distribution covers, by its state and the token before it.

    of_state: [hidden]; of_token: [vocab] float32, the bias included.
    """

    def __init__(self, weight: Tensor, bias: Tensor, hidden: int, vocab: int, link: Link | None):
        """Split the weight. weight: [hidden], or [hidden + rank] with the link's `first` of the token."""
        self.of_state, of_link = weight[:hidden], weight[hidden:].cpu()
        self.of_token = bias.float().cpu().expand(vocab).numpy()
        if link is not None and len(of_link):
            self.of_token = (
                self.of_token + (link.first[:, : len(of_link)] @ of_link.to(link.first.dtype)).float().numpy()
            )

    def prob(self, of_states: Floats, tokens: Integers) -> Floats:
        """Return [n] float32. of_states: [n], the states' part; tokens: [n], the target's ids of those before."""
        said = (of_states + self.of_token[tokens]).clip(-80, 80)  # beyond this exp overflows
        prob: Floats = 1 / (1 + np.exp(-said))
        return prob


class Outputs(NamedTuple):
    """The results of rows' states in one product. logits: [rows, draft_vocab], without links, on the head's device. On
    the CPU: gates [rows, rank], the states' part in the link's gate, zero without one, or what DSpine keeps of them;
    sure: [rows], their part in the confidence, if the head has one.
    """

    logits: Tensor
    gates: Tensor
    sure: Tensor

    def split(self, counts: list[int]) -> list[Outputs]:
        """Split them into groups of so many rows each."""
        return [Outputs(*parts) for parts in zip(*(part.split(counts) for part in self), strict=True)]


class BlockWeights(Head):
    """What the sessions of a block head need of it.

    size: rows of a block. first: the row that predicts the token after the root. depth: tokens predicted. tokens:
    `target_ids` on the CPU.
    """

    method = "block"
    one_pass = True
    published_growth: Policy = Static([(0,) * depth for depth in range(1, 8)])

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, device: torch.device):
        self.device, self.dtype = device, draft_dtype(device)
        config, options = llama_config(checkpoint.config, checkpoint.path), BlockOptions.read(checkpoint)
        hidden = self.hidden_size = config.hidden_size
        checkpoint.match("hidden size", hidden, target.hidden_size)
        checkpoint.match("vocabulary", checkpoint.number("vocab_size", target.vocab_size), target.vocab_size)
        self.feature_layers = options.feature_layers(checkpoint, target.layers)
        self.size, self.first, self.causal, self.windows = options.size, options.first, options.causal, options.windows
        self.depth = self.size - self.first
        # DFlash and DSpark draft a chain; JetSpec takes the best paths over the top seven tokens of each depth.
        chain = Static([(0,) * depth for depth in range(1, self.depth + 1)])
        self.published_growth = Dynamic(self.depth - 1, 7, 128) if options.jet else chain
        vocab = checkpoint.number("draft_vocab_size", target.vocab_size)
        self.target_ids = checkpoint.target_ids(vocab, target.vocab_size).to(device)
        self.tokens: Integers = self.target_ids.cpu().numpy()
        tensors = checkpoint.tensors_for(device, self.dtype)
        embedding = checkpoint.optional_matrix("embed_tokens.weight", target.vocab_size, hidden)
        self.embedding = tensors.joined.table(target.embedding if embedding is None else embedding)
        lm_head = checkpoint.optional_matrix("lm_head.weight", vocab, hidden)
        self.mask = self._mask(checkpoint, options.flash)
        self.fc = Linear(tensors.matrix("fc.weight", hidden, len(self.feature_layers) * hidden))
        self.hidden_norm = RMSNorm(tensors.vector("hidden_norm.weight", hidden), config.rms_norm_eps)
        self.layers = [
            BlockLayer(config, tensors.under(f"layers.{i}."), checkpoint, options) for i in range(options.layers)
        ]
        self.norm = RMSNorm(tensors.vector("norm.weight", hidden), config.rms_norm_eps)
        self.spine: Spine | None = None
        if options.spine is not None:
            if not checkpoint.take("transfer_ready"):
                raise checkpoint.error("tensor transfer_ready says that the head was never trained")
            self.spine = Spine(tensors, options.spine, options.layers, hidden, target.vocab_size, self.size)
        entry = checkpoint.optional_matrix("entry.weight", hidden, 2 * hidden)
        self.entry = None if entry is None else Linear(tensors.joined(entry))
        self.link: Link | None = None
        self.candidates = CANDIDATES
        rank = checkpoint.config.get("markov_rank") or 0
        if rank:
            self.link = markov_link(checkpoint, target.vocab_size, vocab, hidden, device)
        elif options.flash_2 is not None:
            self.candidates = options.flash_2.candidates
            self.link = selector(checkpoint, options.flash_2.rank, self.target_ids, target.vocab_size, hidden, device)
        elif options.spine is not None:
            self.candidates = options.spine.candidates
        self.confidence: Confidence | None = None
        if checkpoint.config.get("enable_confidence_head", False):
            width = hidden + (rank if checkpoint.config.get("confidence_head_with_markov", False) else 0)
            weight = tensors.vector("confidence_head.proj.weight", 1, width)[0]
            bias = tensors.vector("confidence_head.proj.bias", 1)
            self.confidence = Confidence(weight.to(small_dtype(device)), bias, hidden, target.vocab_size, self.link)
        lm_head = some_of(target.lm_head, self.target_ids.cpu()) if lm_head is None else lm_head
        if self.spine is not None:
            self.spine.reads_outputs(self.norm, lm_head)
        self.output = Linear(tensors.joined(lm_head, *self._more_outputs(vocab)))
        checkpoint.ignore("rotary_emb.inv_freq")
        checkpoint.finish()

    def _more_outputs(self, vocab: int) -> list[Tensor]:
        """Return what states are multiplied with beside the output matrix, so that all outputs are whole panels."""
        more = [torch.empty(0, self.hidden_size, device=self.device, dtype=self.dtype)]
        if self.link is not None and self.link.gate is not None:
            more.append(self.link.gate.of_state.T)
        if self.confidence is not None:
            more.append(self.confidence.of_state[None])
        joined = torch.cat([weight.to(self.device, self.dtype) for weight in more])
        padded = F.pad(joined, (0, 0, 0, -(vocab + len(joined)) % LANES))
        return [padded] if len(padded) else []

    def _mask(self, checkpoint: Checkpoint, flash: dict[str, Any]) -> Tensor:
        """Return [hidden]: the embedding of rows whose token is not known."""
        own = checkpoint.take_optional("mask_embedding", self.hidden_size)
        if own is not None:
            return own.to(self.device, self.dtype)
        token = flash.get("mask_token_id", checkpoint.config.get("mask_token_id"))
        if not isinstance(token, int) or not 0 <= token < self.embedding.shape[0]:
            raise checkpoint.error(f"{checkpoint.source}: mask_token_id={token!r} is no token of the target")
        return rows_of(self.embedding, torch.tensor([token]))[0].to(self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's true features [n, layers, hidden] as context, [n, hidden]."""
        return self.hidden_norm(self.fc(features.to(self.dtype).flatten(1)))

    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, caches: Sequence[HeadCache], at: int, mask: Tensor
    ) -> Tensor:
        """Return the rows' states after `norm`, and beside them what DSpine keeps of them. x: [n, hidden], the rows'
        embeddings; tokens: [n], as for `entered`; mask: [n, at + n].
        """
        kept = x[:, :0]
        first = positions[0] - at  # more than 0 if hidden states of the text's beginning were lost
        slots = torch.cat([torch.arange(at, device=self.device) + first, positions])
        for i, (layer, cache, window) in enumerate(zip(self.layers, caches, self.windows, strict=True)):
            near = mask & (slots > positions[:, None] - window) if window else mask
            x = layer(x, positions, cache, at, near)
            if self.spine is not None:
                x, kept = self.spine.inject(i, x, tokens)
        return torch.cat([self.norm(x), kept], dim=1)

    def multiplied(self, states: Tensor) -> Tensor:
        """Return what `outputs` splits. states: of `forward`."""
        made, kept = self.output(states[:, : self.hidden_size]), states[:, self.hidden_size :]
        return made if self.spine is None else torch.cat([made[:, : len(self.target_ids)], kept], dim=1)

    def outputs(self, multiplied: Tensor, on_host: Tensor | None = None) -> Outputs:
        """Split what was multiplied. multiplied: [rows, outputs], states times `output`; see `multiplied`. on_host:
        what is beside the logits there, if it has come to the host.
        """
        vocab, rank = len(self.target_ids), 0 if self.link is None else self.link.first.shape[1]
        gated = self.link is not None and self.link.gate is not None
        logits, parts = multiplied[:, :vocab], multiplied[:, vocab:].cpu() if on_host is None else on_host
        gates = parts[:, :rank] if gated else parts if self.spine is not None else parts.new_zeros(len(parts), rank)
        sure = (
            parts[:, rank if gated else 0 :][:, :1] if self.confidence is not None else parts.new_zeros(len(parts), 1)
        )
        return Outputs(logits, gates, sure[:, 0])

    def predicting(self, path: Sequence[int]) -> range:
        """Return the rows that predict something in a block that starts with this path after the root."""
        return range(self.first + len(path), self.size)

    @cached_property
    def stack(self) -> AnyStack | None:
        """The program of the device from the rows' inputs to their outputs, None where a stack does not fit."""
        if self.spine is not None:
            return None
        layers = [StackLayer(layer.qkv, layer.decoder, layer.input_norm) for layer in self.layers]
        around = [layer.around for layer in self.layers if layer.around is not None]
        ends = self.output, self.entered, self.norm
        return new_stack(StackSpec(layers, self.dtype, *ends, entry=self.entry, windows=self.windows, around=around))

    @cached_property
    def reader(self) -> ContextReader | CudaReader | None:
        """Reads the context into the stack's pool."""
        if self.stack is None:
            return None
        layers = [(layer.decoder, layer.kv) for layer in self.layers]
        if isinstance(self.stack, Stack):
            return ContextReader(self.stack, self.fc, self.hidden_norm, layers)
        return self.stack.reader(self.fc, self.hidden_norm, layers)

    def entered(self, context: Tensor, tokens: Tensor) -> Tensor:
        """Return [rows, inputs]: what rows of blocks start from. context: [rows, hidden], the text's last context
        vector; tokens: [rows], `UNKNOWN` where the mask embedding stands.
        """
        known = rows_of(self.embedding, tokens.clamp(min=0)).to(self.dtype)
        x = torch.where((tokens >= 0)[:, None], known, self.mask)
        return x if self.entry is None else torch.cat([x, context.to(x.dtype)], dim=1)

    def new_caches(self, capacity: int) -> list[HeadCache]:
        return [HeadCache(layer.decoder, capacity) for layer in self.layers]
