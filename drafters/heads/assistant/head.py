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

from drafters.heads.assistant.program import AssistantProgram, ReadingRows
from drafters.heads.assistant.weights import AssistantWeights, read_assistant
from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Dynamic, policy_of
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.heads.session import JointSession, ReadingSession
from drafters.heads.stack import PooledCache
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
        return AssistantSession(self, scratch)

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        for session in sessions:
            session.read()
        if new := [session for session in sessions if session.logits is None]:
            before = torch.stack([session.before for session in new])
            logits, states = self.program.step(before, [session.rows([session.token]) for session in new])
            for session, of_session, state in zip(new, logits.split(1), states, strict=True):
                session.logits, session.states[0] = of_session, state
        return [session.logits for session in sessions if session.logits is not None]

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        before = torch.cat([session.states[parents] for session, parents, _ in asked])
        logits, states = self.program.step(before, [session.rows(tokens) for session, _, tokens in asked])
        counts, found = [len(tokens) for _, _, tokens in asked], list[tuple[list[int], Tensor | None]]()
        parts = zip(asked, logits.split(counts), states.split(counts), strict=True)
        for (session, _, tokens), of_session, after in parts:
            first, session.nodes = session.nodes, session.nodes + len(tokens)
            session.states[first : session.nodes] = after
            found.append((list(range(first, session.nodes)), of_session))
        return found


class AssistantSession(JointSession, ReadingSession):
    """One request: the target's keys and values of its text, and the states of drafted nodes.

    Every node is computed at the position of the text's last token, from its token and the state of its parent, and
    sees the text alone: nodes write no keys. held: positions whose keys are there. states: by node, the state after its
    token.
    """

    def __init__(self, head: AssistantHead, scratch: int):
        super().__init__()
        self.head, self.program, self.scratch, self.held = head, head.program, scratch, 0
        self.cache = PooledCache(head.program.pool)
        self.states = torch.empty(scratch + 1, head.hidden_size, dtype=torch.bfloat16)
        self.nodes = 1
        self.logits: Tensor | None = None  # of node 0
        self.before = torch.empty(0)  # the target's state before the text's last token
        self.token = -1

    def room(self) -> int:
        return self.scratch - (self.nodes - 1)

    def clear(self) -> None:
        self.nodes = 1

    def close(self) -> None:
        self.cache.release()

    def read(self) -> None:
        """Write the keys and values that have come."""
        for _, features, tokens in self._unread:
            self.program.write(self.cache.places(self.held, len(features)), features[:, 1:].flatten(1))
            self.held += len(features)
            self.before = features[-1, 0].clone()  # a view would hold all of them
            self.token, self.logits = tokens[-1], None
        self._unread.clear()

    def rows(self, tokens: list[int]) -> ReadingRows:
        """Return rows of these tokens, which see the text."""
        count = len(tokens)
        return ReadingRows(self.cache, 0, tokens, [self.synced] * count, [self.held] * count, [[]] * count)
