"""Gemma 4's assistant as a draft head: a small model that reads the target's last keys and values, and keeps none.

It predicts the next token from the target's state after its output norm and the embedding of the token that the target
drew from it. For the tokens after that it feeds on its own state, all at one position. The target gives its keys and
values beside its states (`DecoderStructure.last_keys`), so drafts ahead, batches, preemption and the prefix cache work
as for every head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.heads.assistant import session
from drafters.heads.assistant.program import AssistantProgram
from drafters.heads.assistant.session import AssistantSession
from drafters.heads.assistant.weights import AssistantWeights, read_assistant
from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Dynamic, policy_of
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.parts import weights_path
from engine.config import Config
from engine.core.errors import ConfigError
from engine.model.loading import find_device, load_config
from engine.model.structure import pieces_of


class AssistantHead(Head):
    """Drafts over some tokens of the target's vocabulary."""

    method = "assistant"
    published_growth = Dynamic()

    def __init__(self, weights: AssistantWeights, layers: int):
        """Make the head. layers: of the target."""
        self.device, self.weights, self.program = torch.device("cpu"), weights, AssistantProgram(weights)
        self.hidden_size, self.target_ids = self.program.hidden_size, weights.target_ids
        numbers = sum(2 * keys.kv_heads * keys.head_dim for keys in weights.keys)
        self.feature_layers = (*range(layers, layers + 1 + pieces_of(numbers, self.hidden_size)),)

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> AssistantHead:
        """Raise ConfigError: an assistant is read with its target's configuration, by `from_config`."""
        raise ConfigError(f"drafter.path={path}: an assistant drafts for its own target; set method=assistant")

    @classmethod
    def from_config(cls, config: Config) -> HeadDrafter:
        """Return the drafter that `config` describes. Raises ConfigError where there is no CPU to draft on."""
        if find_device(config.device).type != "cpu":
            raise ConfigError("method=assistant: an assistant drafts on a CPU; set device=cpu, or take method=suffix")
        options = config.drafter
        layers = load_config(config.model).get_text_config().num_hidden_layers
        head = cls(read_assistant(config.model, weights_path(config), options.vocabulary), layers)
        drafter = HeadDrafter(head, policy_of(options, head.published_growth), options.shared_noise)
        drafter.warm_up(head.hidden_size)
        return drafter

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> AssistantSession:
        return AssistantSession(self.program, scratch)

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        return [*session.roots(self.program, sessions)]

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        return session.extend(self.program, asked)
