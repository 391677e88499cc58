"""Draft heads: weights that predict a target's next tokens.

A `Head` opens one `Session` per request. Its `HeadDrafter` joins it with a growth policy, which decides which nodes a
tree gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.behind import DraftsBehind
from drafters.heads.growth.policies import Candidates, Policy
from drafters.heads.growth.ranking import Ranking
from drafters.heads.session import Session, Unranked
from engine.core.drafter_protocol import DeviceVerdicts


class Head(ABC):
    """Weights that predict a target's next tokens from its hidden states.

    feature_layers: as `Drafter.feature_layers`. target_ids: [draft_vocab] int64, the target's id of each output.
    method: its name in "talon train". published_growth: the policy its paper used. one_pass: whether whole trees come
    from one forward.
    """

    feature_layers: tuple[int, ...]
    target_ids: Tensor
    device: torch.device
    method: ClassVar[str]
    published_growth: Policy
    one_pass: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> Head:
        """Read a checkpoint in the head's public layout."""

    @abstractmethod
    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> Session:
        """Open a session for a text of at most `capacity` tokens, `prompt` first, with space for `scratch` drafted
        nodes.
        """

    # Calls for several sessions at once, which a head may compute in one forward.

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        """Return `Session.root` of each session."""
        return [session.root() for session in sessions]

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        """Return `Session.extend` of each (session, parents, tokens). Logits last until the next call."""
        return [session.extend(parents, tokens) for session, parents, tokens in asked]

    def rank(self, asked: Sequence[Unranked]) -> list[Candidates]:
        """Return `Session.rank` of each session."""
        if self.device.type == "cpu" or any(one.logits is None for one in asked):
            return [one.session.rank(*one[1:]) for one in asked]
        return Ranking.of_all([(one.ranking, one.logits, one.positions) for one in asked if one.logits is not None])

    @property
    def drafts_ahead(self) -> bool:
        """Whether `draft_behind` can be called, and `draft_ahead` unless all comes from one pass."""
        return False

    def draft_ahead(self, tries: Sequence[Any], policy: Policy) -> None:
        """Draft below node 0 of these tries all that the policy is likely to ask for, and enter it."""
        raise NotImplementedError

    def draft_behind(self, tries: Sequence[Any], verdicts: DeviceVerdicts, policy: Policy) -> DraftsBehind:
        """Read what a round will have come to, and draft what the policy is likely to ask for."""
        raise NotImplementedError

    def begin(self, asked: Sequence[tuple[Any, list[list[int]]]]) -> list[list[int]]:
        """For each session, return the last node of every path below node 0; all are drafted together. A node is -1
        where no block begins: where a path is too long, and with heads that `extend` one token at a time.
        """
        return [[-1] * len(paths) for _, paths in asked]
