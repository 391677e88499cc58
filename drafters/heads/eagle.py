"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): the same head, drafting a static or a dynamic tree.

Public layout: `embed_tokens.weight`, `fc.weight` [h, 2h] (+ `fc.bias`) over [embedding, last hidden state], and one
Llama layer `layers.0.*` without input norm. The target's own lm_head gives the logits. Heads trained here leave out
`embed_tokens.weight`, a frozen copy of the target's; `"target_embeddings": true` in their config says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.feature_head import FeatureHead
from drafters.heads.growth.policies import EAGLE_25, Static
from drafters.heads.layers import DecoderLayer, HeadCache, Linear, PairLinear, draft_dtype, llama_config, qkv_weights
from drafters.heads.matrices import rows_of
from drafters.heads.new_stack import AnyStack, new_stack
from drafters.heads.stack import StackLayer, StackSpec


class EagleHead(FeatureHead):
    """Predicts the target's last hidden state (after its final norm) from the one before and the token between."""

    method = "eagle"
    published_growth = Static(EAGLE_25)

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, device: torch.device):
        self.device, self.dtype = device, draft_dtype(device)
        config = llama_config(checkpoint.config, checkpoint.path)
        self.hidden_size = hidden = config.hidden_size
        checkpoint.match("hidden size", hidden, target.hidden_size)
        checkpoint.match("vocabulary", checkpoint.number("vocab_size", target.vocab_size), target.vocab_size)
        self.feature_layers = (target.layers,)
        self.target_ids = torch.arange(target.vocab_size, device=device)
        embedding = target.embedding
        if not checkpoint.config.get("target_embeddings", False):
            embedding = checkpoint.take_matrix("embed_tokens.weight", target.vocab_size, hidden)
        tensors = checkpoint.tensors_for(device, self.dtype)
        bias = tensors.vector("fc.bias", hidden) if checkpoint.config.get("bias", True) else None

        def embed(tokens: Tensor) -> Tensor:
            return rows_of(embedding, tokens).to(device, self.dtype)

        weight = tensors.matrix("fc.weight", hidden, 2 * hidden)
        self.fc = PairLinear(embed, target.vocab_size, weight, bias)
        of_layer = tensors.under("layers.0.")
        self.qkv = Linear(*qkv_weights(config, of_layer, hidden))
        self.layer = DecoderLayer(config, of_layer, device, self.dtype)
        self.lm_head = Linear(tensors.joined(target.lm_head))
        checkpoint.ignore("rotary_emb.inv_freq")
        checkpoint.finish()

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> EagleHead:
        return cls(Checkpoint(path, "eagle"), target, torch.device(device))

    def fuse(self, features: Tensor) -> Tensor:
        return features[:, 0]

    def forward(
        self, features: Tensor, tokens: Tensor, positions: Tensor, cache: HeadCache, at: int, mask: Tensor | None
    ) -> Tensor:
        x = self.fc(tokens, features)
        return self.layer(self.qkv(x), x, positions, cache, at, mask)

    def logits(self, features: Tensor) -> Tensor:
        return self.lm_head(features)

    def new_cache(self, capacity: int) -> HeadCache:
        return HeadCache(self.layer, capacity)

    def new_stack(self) -> AnyStack | None:
        layers = [StackLayer(self.qkv, self.layer, None)]
        return new_stack(StackSpec(layers, self.dtype, self.lm_head, self.entered, keeps=True))

    def entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.fc(tokens, features.to(self.dtype))
