"""The heads as they train: plain modules whose state dict is the public checkpoint layout.

All share one indexing. Row i of a sequence stands for the text up to token t[i + 1]: the target's feature f[i] and the
token behind it. Draft step k of row i has seen the tokens up to t[i + 1 + k] and predicts t[i + 2 + k]. Some rows of
each text are *anchors*: from them drafts are made, the others are only their context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from drafters.training.loss import Factors
from drafters.training.recipe import Recipe


@dataclass(frozen=True)
class Texts:
    """What a head drafts from. features: [batch, rows, states, hidden], true. tokens: [batch, rows + 1 + steps].

    embedded: [..., hidden], the tokens' embeddings (see `HeadModule.embed`). anchors: [batch, anchors], rows. known:
    [batch, anchors], how many of the tokens to be drafted a block head is shown.
    """

    features: Tensor
    tokens: Tensor
    embedded: Tensor
    anchors: Tensor
    known: Tensor

    def at_anchors(self, values: Tensor, behind: int = 0) -> Tensor:
        """values: [batch, rows or more, ...] -> [batch, anchors, ...], so many rows behind each anchor."""
        batch = torch.arange(len(values), device=values.device)[:, None]
        return values[batch, self.anchors + behind]

    def drafted(self, step: int) -> Tensor:
        """[batch, anchors, hidden]: the embedding of the token that draft step `step` starts from."""
        return self.at_anchors(self.embedded, 1 + step)


class HeadModule(nn.Module, ABC):
    """A head under training. draft_ids: [draft_vocab] the target's id of each output; None, all in order."""

    draft_ids: Tensor | None = None
    learns_prompts = False
    """Whether it learns from the prompts' tokens too; the others only from the target's own words."""

    def embed(self, tokens: Tensor, target: Any) -> Tensor:
        """tokens: [batch, n] -> their embeddings, the target's."""
        embedded: Tensor = target.get_input_embeddings()(tokens)
        return embedded

    @abstractmethod
    def draft(self, texts: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Per draft step what is predicted behind every anchor, [batch, anchors, h], and the feature that became of it.

        Ends early where the head cannot draft so far.
        """

    @abstractmethod
    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        """What the logits of draft step `step` are the product of. states: [n, h]; previous: [n], the token before."""

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor | None:
        """[n] logits of the share of the target's probability that the draft's covers, if it says so."""
        return None

    @abstractmethod
    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """File name, config and tensors of the public layout."""


class AnchoredAttention(nn.Module):
    """Attention of training-time test: step k of an anchor sees the true rows up to it and its own earlier guesses."""

    def __init__(self, config: LlamaConfig, inputs: int):
        super().__init__()
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or self.heads
        self.head_dim: int = config.head_dim or config.hidden_size // self.heads
        self.q_proj = nn.Linear(inputs, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x: [batch, n, inputs]; positions: [batch or 1, n] -> keys and values [batch, heads, n, head_dim]."""
        groups = self.heads // self.kv_heads
        key, value = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        cos, sin = self.rotary(x, positions)
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
        return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)

    def forward(
        self, x: Tensor, anchors: Tensor, true: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x: [batch, anchors, inputs] of step len(own). true: `keys` of all rows; own: of the anchors' steps from 1."""
        cos, sin = self.rotary(x, anchors + len(own))
        query = self._split(self.q_proj(x))
        query, _ = apply_rotary_pos_emb(query, query, cos, sin)
        keys, values = true
        rows = torch.arange(keys.shape[2], device=x.device)
        hidden = rows > anchors[:, None, :, None]
        scores = (query @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        guessed = [(query * key).sum(-1, keepdim=True) for key, _ in own]
        weight = (torch.cat([scores, *guessed], dim=-1).float() * self.head_dim**-0.5).softmax(-1).to(values.dtype)
        attended = weight[..., : len(rows)] @ values
        for index, (_, value) in enumerate(own):
            attended = attended + weight[..., len(rows) + index, None] * value
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """[batch, n, heads * head_dim] -> [batch, heads, n, head_dim]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
        """[batch, rows, states, hidden] -> [batch, rows, hidden]: true features as the head's own kind."""

    @abstractmethod
    def pair(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the layer's attention and the residual stream, of (token, feature) pairs."""

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
        ids = self.draft_ids.cpu()
        maps = {
            "d2t": ids - torch.arange(len(ids)),
            "t2d": torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, ids, True),
        }
        return "model.safetensors", config, {**self.state_dict(), **maps}


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)), or res_connection(x) + ... where the input is wider; starts by passing its first part on."""

    def __init__(self, hidden: int, parts: int = 1):
        super().__init__()
        self.linear = nn.Linear(parts * hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Module = nn.Identity()
        if parts > 1:
            self.res_connection = nn.Linear(parts * hidden, hidden)
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class MedusaModule(HeadModule):
    """Reads nothing but the feature; `wide` gives each head the embeddings drafted before it, which makes it Hydra."""

    wide = False

    def __init__(self, hidden: int, target_head: Tensor, recipe: Recipe):
        super().__init__()
        self.recipe, self.hidden, self.vocab_size = recipe, hidden, len(target_head)
        first = [2 + i if self.wide else 1 for i in range(recipe.heads)]
        self.blocks = nn.ModuleList(
            nn.Sequential(ResidualBlock(hidden, parts), *(ResidualBlock(hidden) for _ in range(recipe.blocks - 1)))
            for parts in first
        )
        self.outputs = nn.ModuleList()
        self.register_buffer("target_head", target_head, persistent=False)
        if not recipe.tie_lm_head:
            for _ in range(recipe.heads):
                self.outputs.append(nn.Linear(hidden, self.vocab_size, bias=False))
                self.outputs[-1].weight.data.copy_(target_head)

    def draft(self, texts: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        x = texts.at_anchors(texts.features[:, :, 0])
        for step in range(min(steps, self.recipe.heads)):
            if self.wide:
                x = torch.cat([x, texts.drafted(step)], dim=-1)
            state = self.blocks[step](x)
            yield state, state

    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        return [(states, self.target_head if self.recipe.tie_lm_head else self.outputs[step].weight)]

    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        config = {
            "medusa_num_heads": self.recipe.heads,
            "medusa_num_layers": self.recipe.blocks,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab_size,
            "tie_lm_head": self.recipe.tie_lm_head,
        }
        state = self.state_dict()
        tensors = {name.removeprefix("blocks."): t for name, t in state.items() if name.startswith("blocks.")}
        for i, output in enumerate(self.outputs):
            tensors[f"{i}.{self.recipe.blocks}.weight"] = output.weight.data
        return "medusa_lm_head.safetensors", config, tensors


class HydraModule(MedusaModule):
    """Teacher forced: head i reads the true tokens where drafting will have guesses."""

    wide = True

    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        config = {
            "hydra_num_heads": self.recipe.heads,
            "hydra_num_layers": self.recipe.blocks,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab_size,
            "tie_lm_head": self.recipe.tie_lm_head,
        }
        tensors = {
            name.replace("blocks.", "hydra_mlp.").replace("outputs.", "hydra_lm_head."): tensor
            for name, tensor in self.state_dict().items()
        }
        return "hydra_lm_head.safetensors", config, tensors


class SmallModule(HeadModule):
    """A small causal LM that learns the target's distribution; it reads the text from t[0] on, and no features."""

    learns_prompts = True

    def __init__(self, recipe: Recipe, target_config: Any, target_embedding: Tensor):
        super().__init__()
        hidden = recipe.hidden_size
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(target_embedding),
                hidden_size=hidden,
                intermediate_size=recipe.intermediate_size or 4 * hidden,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.attention_heads,
                max_position_embeddings=target_config.max_position_embeddings,
                bos_token_id=target_config.bos_token_id,
                eos_token_id=target_config.eos_token_id,
                tie_word_embeddings=True,
            )
        )
        # the target's embedding along its main axes: what words are alike is known from the first step
        torch.manual_seed(recipe.seed)
        axes = torch.pca_lowrank(target_embedding, q=hidden, niter=4)
        main = axes[0] * axes[1]
        self.lm.get_input_embeddings().weight.data.copy_(main * 0.02 / main.std())

    def embed(self, tokens: Tensor, target: Any) -> Tensor:
        embedded: Tensor = self.lm.get_input_embeddings()(tokens)
        return embedded

    def draft(self, texts: Texts, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        read = self.lm.model(inputs_embeds=texts.embedded[:, : texts.features.shape[1] + 1]).last_hidden_state
        state = texts.at_anchors(read, 1)
        yield state, state

    def factors(self, states: Tensor, step: int, previous: Tensor) -> Factors:
        return [(states, self.lm.lm_head.weight)]

    def export(self) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        tensors = {name: tensor for name, tensor in self.lm.state_dict().items() if name != "lm_head.weight"}
        config = {**self.lm.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        return "model.safetensors", config, tensors


def llama_values(config: LlamaConfig) -> dict[str, Any]:
    """What a head's config.json says of its layer."""
    keys = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    )  # fmt: skip
    return {"model_type": "llama", "num_hidden_layers": 1, **{key: getattr(config, key) for key in keys}}
