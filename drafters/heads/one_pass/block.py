"""One-pass heads as drafters use them: their weights, with the sessions that run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.heads.checkpoint import WEIGHT_FILES, Checkpoint, TargetWeights
from drafters.heads.growth.behind import DraftsBehind
from drafters.heads.growth.policies import Candidates, Policy
from drafters.heads.one_pass.behind import draft_behind
from drafters.heads.one_pass.block_forward import find_all
from drafters.heads.one_pass.block_session import BlockSession, begin
from drafters.heads.one_pass.block_weights import BlockWeights
from drafters.heads.session import Unranked
from engine.core.drafter_protocol import DeviceVerdicts


class BlockHead(BlockWeights):
    """A head that drafts whole trees from one forward; see `BlockWeights` for the layouts."""

    @classmethod
    def load(cls, path: str, target: TargetWeights, device: str = "cpu") -> BlockHead:
        return cls(Checkpoint(path, "block", WEIGHT_FILES), target, torch.device(device))

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        begin([(session, [()]) for session in sessions])
        return [None] * len(sessions)

    def rank(self, asked: Sequence[Unranked]) -> list[Candidates]:
        if self.device.type != "cpu":
            sessions: list[Any] = [one.session for one in asked]
            new = [(each, one.ranking) for one, of in zip(asked, sessions, strict=True) for each in of.forwards]
            find_all(new)
        return super().rank(asked)

    @property
    def drafts_ahead(self) -> bool:
        return hasattr(self.stack, "draft_behind")

    def draft_behind(self, tries: Sequence[Any], verdicts: DeviceVerdicts, policy: Policy) -> DraftsBehind:
        return draft_behind(self, tries, verdicts)

    def begin(self, asked: Sequence[tuple[Any, list[list[int]]]]) -> list[list[int]]:
        begin([(session, session.short(paths)) for session, paths in asked])
        return [session.ends(paths) for session, paths in asked]

    def open(self, prompt: Sequence[int], capacity: int, scratch: int) -> BlockSession:
        return BlockSession(self, capacity)
