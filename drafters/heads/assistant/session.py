"""The session of an assistant: the target's keys and values of one text, and the states of drafted nodes.

Every node is computed at the position of the text's last token, from its token and the state of its parent, and sees
the text alone: nodes write no keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.heads.assistant.program import AssistantProgram, ReadingRows
from drafters.heads.session import Session
from drafters.heads.stack import PooledCache


class AssistantSession(Session):
    """One request. held: positions whose keys are there. states: by node, the state after its token."""

    def __init__(self, program: AssistantProgram, scratch: int):
        self.program, self.scratch, self.held = program, scratch, 0
        self.cache = PooledCache(program.pool)
        self.states = torch.empty(scratch + 1, program.hidden_size, dtype=torch.bfloat16)
        self.nodes = 1
        self.logits: Tensor | None = None  # of node 0
        self.before = torch.empty(0)  # the target's state before the text's last token
        self.token = -1
        self._unread: list[Tensor] = []

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        # Written when first needed: a verdict whose next tree is already drafted must not wait for it.
        self._unread.append(features)
        self.synced, self.token = start + len(tokens), tokens[-1]
        self.clear()
        self.logits = None

    def count_unread(self) -> int:
        return sum(map(len, self._unread))

    def root(self) -> Tensor:
        (logits,) = roots(self.program, [self])
        return logits

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor | None]:
        (extended,) = extend(self.program, [(self, parents, tokens)])
        return extended

    def room(self) -> int:
        return self.scratch - (self.nodes - 1)

    def clear(self) -> None:
        self.nodes = 1

    def close(self) -> None:
        self.cache.release()

    def read(self) -> None:
        """Write the keys and values that have come."""
        for features in self._unread:
            self.program.write(self.cache.places(self.held, len(features)), features[:, 1:].flatten(1))
            self.held += len(features)
            self.before = features[-1, 0].clone()  # a view would hold all of them
        self._unread.clear()

    def rows(self, tokens: list[int]) -> ReadingRows:
        """Return rows of these tokens, which see the text."""
        count = len(tokens)
        return ReadingRows(self.cache, 0, tokens, [self.synced] * count, [self.held] * count, [[]] * count)


def roots(program: AssistantProgram, sessions: Sequence[AssistantSession]) -> list[Tensor]:
    """Return each session's logits after its text, [1, tokens]."""
    new = [session for session in sessions if session.logits is None]
    for session in new:
        session.read()
    if new:
        before = torch.stack([session.before for session in new])
        logits, states = program.step(before, [session.rows([session.token]) for session in new])
        for session, of_session, state in zip(new, logits.split(1), states, strict=True):
            session.logits, session.states[0] = of_session, state
    return [session.logits for session in sessions if session.logits is not None]


def extend(
    program: AssistantProgram, asked: Sequence[tuple[AssistantSession, list[int], list[int]]]
) -> list[tuple[list[int], Tensor | None]]:
    """Draft new nodes of several sessions in one forward."""
    before = torch.cat([session.states[parents] for session, parents, _ in asked])
    logits, states = program.step(before, [session.rows(tokens) for session, _, tokens in asked])
    counts, found = [len(tokens) for _, _, tokens in asked], list[tuple[list[int], Tensor | None]]()
    for (session, _, tokens), of_session, after in zip(asked, logits.split(counts), states.split(counts), strict=True):
        first, session.nodes = session.nodes, session.nodes + len(tokens)
        session.states[first : session.nodes] = after
        found.append((list(range(first, session.nodes)), of_session))
    return found
