"""The block head in training (`drafters.heads.one_pass.block`): all draft steps of an anchor are rows of one block.

Row 0 holds the anchor's token, the others the mask, except for *known prefixes*: in a share of the drafts the first
tokens after the anchor are given, as they are when the head drafts after a retrieved passage or a possible outcome.
Every row also holds the last context vector (`entry`): attention alone takes long to learn to fetch it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from drafters.heads.checkpoint import Checkpoint
from drafters.heads.matrices import numbers
from drafters.training.anchored_attention import AnchoredAttention
from drafters.training.head_module import HeadModule, Texts, llama_values, vocabulary_maps
from drafters.training.loss import Factors
from drafters.training.recipe import Recipe

_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_SAMPLED = 256  # tokens, of which the size of hidden states is measured


class BlockAttention(AnchoredAttention):
    """Each row sees the text up to its anchor, and the rows of its block up to itself."""

    def block(self, x: Tensor, texts: Texts, true: tuple[Tensor, Tensor]) -> Tensor:
        """Attend, and return the same shape. x: [batch, anchors, rows, hidden]; true: `keys` of the context."""
        count, size = x.shape[1:3]
        positions = (texts.anchors[:, :, None] + 1 + torch.arange(size, device=x.device)).flatten(1)
        flat = x.flatten(1, 2)
        cos, sin = self.rotary(flat, positions)
        query = self._split(self.q_proj(flat))
        query = apply_rotary_pos_emb(query, query, cos, sin)[0] * self.head_dim**-0.5
        key, value = (states.unflatten(2, (count, size)) for states in self.keys(flat, positions))
        keys, values = true
        later_rows = torch.arange(keys.shape[2], device=x.device) > texts.anchors[:, None, :, None]
        scores = (
            (query @ keys.transpose(2, 3)).unflatten(2, (count, size)).masked_fill(later_rows[..., None, :], -torch.inf)
        )
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        own = (query.unflatten(2, (count, size)) @ key.transpose(3, 4)).masked_fill(later, -torch.inf)
        weight = torch.cat([scores, own], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
        context = (weight[..., : keys.shape[2]].flatten(2, 3) @ values).unflatten(2, (count, size))
        attended = context + weight[..., keys.shape[2] :] @ value
        return self.o_proj(attended.permute(0, 2, 3, 1, 4).flatten(3))


class BlockLayerModule(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, texts: Texts, context: Tensor) -> Tensor:
        true = self.self_attn.keys(context, torch.arange(context.shape[1], device=x.device)[None])
        x = x + self.self_attn.block(self.input_layernorm(x), texts, true)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovLink(nn.Module):
    """What the previous token adds to a row's logits: markov_w2 (gate * w1[token]), gate = sigmoid(gate_proj [h; w1]).

    markov_w1 is a linear map of the target's embedding, so that tokens too rare to be learned have a link as well.
    """

    def __init__(self, embedding: Tensor, rank: int, outputs: int):
        super().__init__()
        hidden = embedding.shape[1]
        centred = embedding.float()
        centred = centred - centred.mean(0)
        spread, axes = torch.linalg.eigh(centred.T @ centred)  # ascending; as of an SVD, in a fraction of its time
        scale = (len(embedding) / spread[-rank:].flip(0)).sqrt()  # gives each principal axis variance one
        self.axes = nn.Parameter(axes[:, -rank:].flip(1) * scale)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        self.gate_proj = nn.Linear(hidden + rank, rank)
        self.register_buffer("embedding", embedding, persistent=False)  # the target's own memory

    def of(self, tokens: Tensor) -> Tensor:
        """Return [n, rank] for tokens [n]."""
        return self.embedding[tokens].to(self.axes.dtype) @ self.axes

    def gated(self, states: Tensor, linked: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(torch.cat([states, linked], dim=-1))) * linked

    def begin_with(self, markov_w1: Tensor) -> None:
        """Take the axes that lead to markov_w1: [vocab, rank], which `export` computes."""
        there = self.axes.device
        self.axes.copy_(torch.linalg.lstsq(self.embedding.float(), markov_w1.to(there).float()).solution)

    def export(self) -> dict[str, Tensor]:
        return {
            "markov_w1.weight": self.embedding.to(self.axes.dtype) @ self.axes,
            "markov_w2.weight": self.markov_w2.weight.data,
            "gate_proj.weight": self.gate_proj.weight.data,
            "gate_proj.bias": self.gate_proj.bias.data,
        }


class BlockModule(HeadModule):
    def __init__(self, config: LlamaConfig, recipe: Recipe, target: Any, draft_ids: Tensor, states: tuple[int, ...]):
        super().__init__()
        hidden = config.hidden_size
        embedding = target.get_input_embeddings().weight.detach()
        head = target.get_output_embeddings().weight.detach()
        self.config, self.recipe, self.states, self.draft_ids = config, recipe, states, draft_ids
        self.vocab_size = len(embedding)
        self.fc = nn.Linear(len(states) * hidden, hidden, bias=False)
        self.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayerModule(config) for _ in range(recipe.layers))
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.entry = nn.Linear(2 * hidden, hidden, bias=False)
        self.mask_embedding = nn.Parameter(embedding.float().mean(0))
        self.markov_head = MarkovLink(embedding, recipe.markov_rank, len(draft_ids))
        self.confidence_head = nn.Linear(hidden + recipe.markov_rank, 1)
        self.register_buffer("target_head", head[draft_ids.to(head.device)], persistent=False)
        self._begin_as(target)

    @torch.no_grad()
    def _begin_as(self, target: Any) -> None:
        """Begin as the target's last layers, which read the deepest state: much of the work is the same."""
        hidden, embedding = self.config.hidden_size, target.get_input_embeddings().weight
        depth = _size_of(target, self.draft_ids, self.states[-1])
        self.fc.weight.mul_(0.1)[:, -hidden:] += torch.eye(hidden)
        token = torch.eye(hidden) * (0.5 * depth / float(embedding.float().pow(2).mean().sqrt()))
        self.entry.weight.copy_(torch.cat([token, torch.eye(hidden) * depth], dim=1))
        for mine, theirs in zip(self.layers, target.base_model.layers[-self.recipe.layers :], strict=True):
            _begin_layer(mine, theirs)
        self.norm.weight.copy_(target.base_model.norm.weight)

    def draft(self, texts: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        size = min(self.recipe.unroll, steps)
        context = self.hidden_norm(self.fc(texts.features.flatten(2)))
        given = torch.stack([texts.drafted(step) for step in range(size)], dim=2)
        masked = torch.arange(size, device=given.device) > texts.known[:, :, None]
        x = torch.where(masked[..., None], self.mask_embedding.to(given.dtype), given)
        last = texts.at_anchors(context)[:, :, None].expand_as(x)
        x = self.entry(torch.cat([x, last.to(x.dtype)], dim=-1))
        for layer in self.layers:
            x = layer(x, texts, context)
        x = self.norm(x)
        for step in range(size):
            yield x[:, :, step], x[:, :, step]

    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        linked = self.markov_head.gated(states, self.markov_head.of(previous))
        return [(states, self.target_head), (linked, self.markov_head.markov_w2.weight)]

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        features = torch.cat([states, self.markov_head.of(previous)], dim=-1).detach()
        return self.confidence_head(features).squeeze(-1)

    @torch.no_grad()
    def begin_with(self, start: Checkpoint) -> None:
        link = start.tensors.get("markov_head.markov_w1.weight")
        for name, own in self.state_dict().items():
            if name.startswith("layers.") and name.endswith(".bias"):
                start.tensors.setdefault(name, torch.zeros_like(own))  # of a head that was made without them
        super().begin_with(start)  # refuses a head without a link
        assert link is not None
        self.markov_head.begin_with(numbers(link))

    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        assert self.draft_ids is not None
        left_out = "markov_head.", "confidence_head."
        tensors = {name: t for name, t in self.state_dict().items() if not name.startswith(left_out)}
        tensors |= {f"markov_head.{name}": tensor for name, tensor in self.markov_head.export().items()}
        tensors |= {f"confidence_head.proj.{name}": t for name, t in self.confidence_head.state_dict().items()}
        tensors |= vocabulary_maps(self.draft_ids, self.vocab_size)
        config = {
            **llama_values(self.config),
            **({"qkv_bias": True} if self.config.qkv_bias else {}),
            "num_hidden_layers": self.recipe.layers,
            "block_size": self.recipe.unroll,
            "target_layer_ids": [state - 1 for state in self.states],
            "draft_vocab_size": len(self.draft_ids),
            "causal": True,
            "known_beginnings": self.recipe.known_share > 0,
            "markov_rank": self.recipe.markov_rank,
            "markov_head_type": "gated",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return "model.safetensors", config, tensors


def _size_of(target: Any, tokens: Tensor, state: int) -> float:
    """Return how large the numbers of a hidden state are: the root of their mean square, the median over a text."""
    text = tokens[:_SAMPLED][None].to(target.device)
    states = target.base_model(text, output_hidden_states=True, use_cache=False).hidden_states[state]
    return float(states[0, 1:].float().pow(2).mean(-1).sqrt().median())


def _begin_layer(mine: BlockLayerModule, theirs: Any) -> None:
    """Copy what has the same shape, and the most important inner numbers of a wider MLP. The context is not multiplied
    by the weight of the input's norm, so the products have that weight.
    """
    own, given = dict(mine.named_parameters()), dict(theirs.named_parameters())
    if all(name in given for name in _MLP):
        gate, up, down = (given[name].float() for name in _MLP)
        weights = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = weights.topk(min(len(weights), mine.mlp.up_proj.out_features)).indices.sort().values
        given |= zip(_MLP, (gate[kept], up[kept], down[:, kept]), strict=True)
    for name, weight in own.items():
        if (copied := given.get(name)) is not None and copied.shape == weight.shape:
            weight.copy_(copied)
    scale = mine.input_layernorm.weight.clone()
    for product in (mine.self_attn.q_proj, mine.self_attn.k_proj, mine.self_attn.v_proj):
        product.weight.mul_(scale)
    mine.input_layernorm.weight.fill_(1)
