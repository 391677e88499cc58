"""Heads that draft by predicting the target's next feature: their weights, with the sessions that run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drafters.heads import pooled_session
from drafters.heads.feature_session import FeatureSession, FeatureWeights
from drafters.heads.growth.behind import DraftsBehind
from drafters.heads.growth.policies import Policy
from drafters.heads.session import Session
from engine.core.drafter_protocol import DeviceVerdicts


class FeatureHead(FeatureWeights):
    """Everything that the EAGLE heads have in common: all but the layer itself."""

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        return super().roots(sessions) if self.stack is None else pooled_session.roots(self, sessions)

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        return super().extend(asked) if self.stack is None else pooled_session.extend(self, asked)

    @property
    def drafts_ahead(self) -> bool:
        return hasattr(self.stack, "draft_ahead")

    def draft_ahead(self, tries: Sequence[Any], policy: Policy) -> None:
        stack: Any = self.stack  # one that has the method
        roots = self.roots([trie.session for trie in tries])
        stack.draft_ahead(tries, roots, policy)

    def draft_behind(self, tries: Sequence[Any], verdicts: DeviceVerdicts, policy: Policy) -> DraftsBehind:
        stack: Any = self.stack
        launched: DraftsBehind = stack.draft_behind(self.keep, tries, verdicts, policy)
        return launched

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> Session:
        if self.stack is not None:
            return pooled_session.PooledSession(self, scratch)
        return FeatureSession(self, capacity, scratch)
