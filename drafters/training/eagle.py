"""The EAGLE family in training: a layer over pairs of a token and a feature, fed with its own features."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from drafters.training.anchored_attention import AnchoredAttention
from drafters.training.head_module import HeadModule, Texts, llama_values, vocabulary_maps
from drafters.training.loss import Factors


class DraftLayer(nn.Module):
    """A Llama layer whose caller normalises the attention's input; extra norms carry their public names."""

    def __init__(self, config: LlamaConfig, inputs: int, norms: tuple[str, ...] = ()):
        super().__init__()
        for name in norms:
            self.add_module(name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn = AnchoredAttention(config, inputs)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        anchors: Tensor,
        true: tuple[Tensor, Tensor],
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        x = residual + self.self_attn(x, anchors, true, own)
        return x + self.mlp(self.post_attention_layernorm(x))


class FeatureModule(HeadModule):
    """Training-time test of the EAGLE family: a step's feature is the next one's input."""

    layer: DraftLayer

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Return true features [batch, rows, states, hidden] as the head's own kind, [batch, rows, hidden]."""

    @abstractmethod
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the layer's attention and the residual stream, for (token, feature) pairs."""

    def draft(self, texts: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        fused, attention = self.fuse(texts.features), self.layer.self_attn
        rows = fused.shape[1]
        x, residual = self.pair(texts.embedded[:, 1 : rows + 1], fused)
        true = attention.keys(x, torch.arange(rows, device=x.device)[None])
        x, residual = texts.at_anchors(x), texts.at_anchors(residual)
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, steps + 1):
            feature = self.layer(x, residual, texts.anchors, true, own)
            yield feature, feature
            if step < steps:
                x, residual = self.pair(texts.drafted(step), feature)
                own.append(attention.keys(x, texts.anchors + step))


class EagleModule(FeatureModule):
    def __init__(self, config: LlamaConfig, target_head: Tensor):
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([DraftLayer(config, hidden)])
        self.register_buffer("target_head", target_head, persistent=False)

    @property
    def layer(self) -> DraftLayer:  # type: ignore[override]
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        return features[:, :, 0]

    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, feature], dim=-1))
        return x, x

    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        return [(states, self.target_head)]

    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        config = {**llama_values(self.config), "bias": True, "target_embeddings": True}
        return "model.safetensors", config, dict(self.state_dict())


class Eagle3Module(FeatureModule):
    def __init__(self, config: LlamaConfig, target_head: Tensor, draft_ids: Tensor):
        super().__init__()
        hidden = config.hidden_size
        self.config, self.vocab_size = config, len(target_head)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(config, 2 * hidden, ("hidden_norm", "input_layernorm"))
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(draft_ids), bias=False)
        self.lm_head.weight.data.copy_(target_head[draft_ids])
        self.draft_ids = draft_ids

    @property
    def layer(self) -> DraftLayer:  # type: ignore[override]
        return self.midlayer

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features.flatten(2))

    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], dim=-1), feature

    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        return [(self.norm(states), self.lm_head.weight)]

    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        assert self.draft_ids is not None
        config = {**llama_values(self.config), "draft_vocab_size": len(self.draft_ids)}
        maps = vocabulary_maps(self.draft_ids, self.vocab_size)
        return "model.safetensors", config, {**self.state_dict(), **maps}
