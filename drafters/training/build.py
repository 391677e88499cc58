"""Builds the module that is trained from a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from drafters.training.block import BlockModule
from drafters.training.eagle import Eagle3Module, EagleModule
from drafters.training.features import kept_states
from drafters.training.head_module import HeadModule
from drafters.training.medusa import HydraModule, MedusaModule
from drafters.training.recipe import Recipe
from drafters.training.small_model import SmallModule


def build(recipe: Recipe, target: Any, draft_ids: Tensor) -> HeadModule:
    """Return a fresh head for a loaded target, initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    config = target.config.get_text_config()
    head = target.get_output_embeddings().weight.detach().float().cpu()
    if recipe.method == "medusa":
        return MedusaModule(config.hidden_size, head, recipe)
    if recipe.method == "hydra":
        return HydraModule(config.hidden_size, head, recipe)
    if recipe.method == "sps":
        return SmallModule(recipe, config, target.get_input_embeddings().weight.detach().float().cpu())
    heads = config.num_attention_heads
    draft = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=inner_size(recipe, config),
        num_hidden_layers=recipe.layers if recipe.method == "block" else 1,
        num_attention_heads=heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        qkv_bias=recipe.method == "block" and _has_bias(target),
    )
    if recipe.method == "block":
        return BlockModule(draft, recipe, target, draft_ids, kept_states(config.num_hidden_layers)[:-1])
    return EagleModule(draft, head) if recipe.method == "eagle" else Eagle3Module(draft, head, draft_ids)


def inner_size(recipe: Recipe, config: Any) -> int:
    """Return the width of a layer's MLP: the recipe's, else the target's."""
    if recipe.intermediate_size is not None or recipe.mlp_ratio is None:
        return int(recipe.intermediate_size or config.intermediate_size)
    return min(int(recipe.mlp_ratio * config.hidden_size + 0.5), int(config.intermediate_size))


def _has_bias(target: Any) -> bool:
    """Return whether the target adds biases to its queries, which a head that begins as its last layers needs too."""
    attention = getattr(target.base_model.layers[-1], "self_attn", None)
    return getattr(getattr(attention, "q_proj", None), "bias", None) is not None
