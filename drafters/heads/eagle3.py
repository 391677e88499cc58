"""EAGLE-3 (arXiv 2503.01840): three of the target's hidden states fused, an output matrix of its own, and a vocabulary
of the most frequent tokens.

Public layout: `fc.weight` [h, 3 * target hidden]; `midlayer.*`, a Llama layer whose attention reads the normalised
embedding and feature, concatenated; `norm.weight`; `lm_head.weight` [draft_vocab, h]; `d2t` [draft_vocab], what to add
to a draft id to get the target's; `t2d` [vocab], which target ids have one. Embeddings are the target's, unless the
file has its own, and so is the output matrix. The config may change three things, as in `speculators` heads:
`norm_before_residual` adds the attention's output to the normalised feature, `eagle_aux_hidden_state_layer_ids` names
the hidden states, and `norm_before_fc` normalises them together (`input_norm.weight`, [3 * target hidden]).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.feature_head import FeatureHead
from drafters.heads.growth.policies import Dynamic
from drafters.heads.layers import (
    DecoderLayer,
    HeadCache,
    Linear,
    PairLinear,
    RMSNorm,
    draft_dtype,
    llama_config,
    qkv_weights,
)
from drafters.heads.matrices import rows_of, some_of
from drafters.heads.new_stack import AnyStack, new_stack
from drafters.heads.stack import StackLayer, StackSpec
from engine.core.errors import DrafterMismatch


def fused_layers(layers: int) -> tuple[int, int, int]:
    """Return the hidden states that EAGLE-3 reads: those entering layers 2, L // 2 and L - 3."""
    return (2, layers // 2, layers - 3)


class Eagle3Head(FeatureHead):
    """The EAGLE-3 head. The layer's output before `norm` is the next feature, of the same kind as `fuse` makes from
    true ones.
    """

    method = "eagle3"
    published_growth = Dynamic()

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, device: torch.device):
        self.device, self.dtype = device, draft_dtype(device)
        config = llama_config(checkpoint.config, checkpoint.path)
        self.hidden_size = hidden = config.hidden_size
        target_hidden = checkpoint.number("target_hidden_size", hidden)
        vocab = checkpoint.number("draft_vocab_size", target.vocab_size)
        checkpoint.match("hidden size", target_hidden, target.hidden_size)
        checkpoint.match("vocabulary", checkpoint.number("vocab_size", target.vocab_size), target.vocab_size)
        self.feature_layers = self._feature_layers(checkpoint, target.layers)
        self.norm_before_residual = bool(checkpoint.config.get("norm_before_residual", False))
        tensors = checkpoint.tensors_for(device, self.dtype)
        of_layer = tensors.under("midlayer.")
        own = checkpoint.optional_matrix("embed_tokens.weight", target.vocab_size, hidden)
        if own is None:
            checkpoint.match("embedding size", hidden, target.hidden_size)
        self.target_ids = checkpoint.target_ids(vocab, target.vocab_size).to(device)
        self.input_norm: RMSNorm | None = None  # of the three hidden states together
        if checkpoint.config.get("norm_before_fc", False):
            self.input_norm = RMSNorm(tensors.vector("input_norm.weight", 3 * target_hidden), config.rms_norm_eps)
        self.fc = Linear(tensors.matrix("fc.weight", hidden, 3 * target_hidden))
        embedding_norm = RMSNorm(of_layer.vector("input_layernorm.weight", hidden), config.rms_norm_eps)
        embedding = target.embedding if own is None else own
        self.feature_norm = RMSNorm(of_layer.vector("hidden_norm.weight", hidden), config.rms_norm_eps)

        def embed(tokens: Tensor) -> Tensor:
            return embedding_norm(rows_of(embedding, tokens).to(device, self.dtype))

        self.qkv = PairLinear(embed, target.vocab_size, *qkv_weights(config, of_layer, 2 * hidden))
        self.layer = DecoderLayer(config, of_layer, device, self.dtype)
        self.norm = RMSNorm(tensors.vector("norm.weight", hidden), config.rms_norm_eps)
        lm_head = checkpoint.optional_matrix("lm_head.weight", vocab, hidden)
        if lm_head is None:
            checkpoint.match("hidden size", hidden, target.hidden_size)
            lm_head = some_of(target.lm_head, self.target_ids.cpu())
        self.lm_head = Linear(tensors.joined(lm_head))
        checkpoint.ignore("rotary_emb.inv_freq")
        checkpoint.finish()

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> Eagle3Head:
        return cls(Checkpoint(path, "eagle3"), target, torch.device(device))

    @staticmethod
    def _feature_layers(checkpoint: Checkpoint, layers: int) -> tuple[int, ...]:
        """Return the three hidden states that the head was trained on, those entering these layers of the target."""
        named = checkpoint.config.get("eagle_aux_hidden_state_layer_ids")
        read = fused_layers(layers) if named is None else named
        if not isinstance(read, list | tuple) or len(read) != 3 or not all(isinstance(layer, int) for layer in read):
            raise checkpoint.error(
                f"{checkpoint.source}: eagle_aux_hidden_state_layer_ids={named} does not name three layers"
            )
        if read[-1] < 1 or not all(0 <= layer < layers for layer in read):
            raise DrafterMismatch(
                f"target has {layers} layers, EAGLE-3 reads layers {', '.join(map(str, read))} "
                f'(drafter.path={checkpoint.path}): use a deeper target, or "talon train eagle"'
            )
        return tuple(read)

    def fuse(self, features: Tensor) -> Tensor:
        joined = features.flatten(1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, cache: HeadCache, at: int, mask: Tensor | None
    ) -> Tensor:
        normed = self.feature_norm(features)
        residual = normed if self.norm_before_residual else features
        return self.layer(self.qkv(tokens, normed), residual, positions, cache, at, mask)

    def logits(self, features: Tensor) -> Tensor:
        return self.lm_head(self.norm(features))

    def new_cache(self, capacity: int) -> HeadCache:
        return HeadCache(self.layer, capacity)

    def new_stack(self) -> AnyStack | None:
        layer = StackLayer(self.qkv.linear, self.layer, None if self.norm_before_residual else self.feature_norm)
        return new_stack(
            StackSpec([layer], self.dtype, self.lm_head, self.entered, self.norm, self.qkv.of_token, keeps=True)
        )

    def entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        if tokens.device.type == "cpu":
            self.qkv.reserve(tokens.numpy())
        return self.feature_norm(features.to(self.dtype)) if self.norm_before_residual else features
