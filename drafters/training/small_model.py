"""A small causal LM in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.training.head_module import HeadModule, Texts
from drafters.training.loss import Factors
from drafters.training.recipe import Recipe


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
        # The target's embedding along its principal axes: similar words are close from the first step.
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
