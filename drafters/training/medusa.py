"""Medusa and Hydra in training: a stack of residual blocks for each draft step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.training.head_module import HeadModule, Texts
from drafters.training.loss import Factors
from drafters.training.recipe import Recipe


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)), or res_connection(x) + ... where the input is wider; initially passes its first part on."""

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
    """Reads only the feature; `wide` also gives each head the embeddings drafted before it, which makes it Hydra."""

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
    """Teacher-forced: head i reads the true tokens where drafting will have guesses."""

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
