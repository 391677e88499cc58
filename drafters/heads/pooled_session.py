"""Heads whose rows of all requests go through one stack, and their sessions.

What `drafters.heads.feature_head` says about slots and nodes holds here too. The differences: keys, values and
features of all requests lie in one pool, and a node lists the slots of its ancestors instead of having a mask. A
feature lies in the slot of the row that it was guessed after, node 0's in that of the text's last position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from drafters.heads.head import Head
from drafters.heads.new_stack import AnyStack
from drafters.heads.session import JointSession, ReadingSession
from drafters.heads.stack import PooledCache
from engine.core.batch import Rows
from engine.device import uploaded

_READ = 512  # positions of texts that are read in one forward


class PooledWeights(Head):
    """A head whose rows for all requests run in one stack. It predicts the next hidden state from a hidden state and
    the token after it, and drafts on from its own prediction.
    """

    hidden_size: int
    dtype: torch.dtype

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's true features [n, layers, hidden] as the head's own kind, [n, hidden_size]."""

    @abstractmethod
    def new_stack(self) -> AnyStack | None:
        """Return the head's layer and output matrix as a program, None where a stack does not fit."""

    @abstractmethod
    def entered(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return what the stack's rows start from for these pairs."""

    @cached_property
    def stack(self) -> AnyStack | None:
        return self.new_stack()

    def keep(self, features: Tensor, places: Tensor) -> None:
        """Keep true features, [rows, layers, hidden], at these places of the stack's pool, [rows]."""
        assert self.stack is not None
        kept = self.stack.pool.features
        kept.index_copy_(0, places, self.fuse(features.to(self.dtype)).to(kept.dtype))

    def guess(self, above: Sequence[int], parts: Sequence[Rows], chosen: Sequence[int] | None) -> Tensor:
        """Return logits [chosen, draft_vocab] after pairs of features and the parts' tokens. above: [rows], the slots
        of the pool where the features are kept; the guessed ones are kept in the rows' own slots afterwards.
        """
        assert self.stack is not None
        return self.stack.run(above, parts, chosen)

    def roots(self, sessions: Sequence[Any]) -> list[Tensor | None]:
        """Return each session's logits after its text, [1, draft_vocab]; unread positions are read first."""
        if self.stack is None:
            return super().roots(sessions)
        while reading := [session for session in sessions if session.count_unread()]:
            taken: list[tuple[PooledSession, Tensor, Rows]] = []
            room = _READ
            for session in reading:
                if room:
                    taken.append((session, *session.take(room)))
                    room -= len(taken[-1][2])
            self._read(taken)
        return [session.logits for session in sessions]

    def _read(self, taken: Sequence[tuple[PooledSession, Tensor, Rows]]) -> None:
        """Read positions of several texts in one forward."""
        parts = [rows for _, _, rows in taken]
        for rows in parts:
            rows.cache.reserve(rows.first + len(rows))
        slots = [slot for rows in parts for slot in rows.slots]
        true = torch.cat([features for _, features, _ in taken]).to(self.dtype)  # all come from the same place
        self.keep(*uploaded([true, torch.tensor(slots)], self.device))
        last = [end - 1 for end in accumulate(map(len, parts))]
        for (session, _, rows), of_session in zip(taken, self.guess(slots, parts, last).split(1), strict=True):
            session.took(rows)
            session.logits = of_session

    def extend(self, asked: Sequence[tuple[Any, list[int], list[int]]]) -> list[tuple[list[int], Tensor | None]]:
        if self.stack is None:
            return super().extend(asked)
        above = [session.places[parent] for session, parents, _ in asked for parent in parents]
        parts = [session.grow(parents, tokens) for session, parents, tokens in asked]
        logits = self.guess(above, parts, None).split(list(map(len, parts)))
        return [
            (list(range(len(session.positions) - len(part), len(session.positions))), of_session)
            for (session, _, _), part, of_session in zip(asked, parts, logits, strict=True)
        ]


class PooledSession(JointSession, ReadingSession):
    """One request of a `FeatureHead`; node n > 0 occupies the slot `first + n - 1`."""

    def __init__(self, head: PooledWeights, scratch: int):
        super().__init__()
        assert head.stack is not None
        self.head, self.scratch = head, scratch
        self.cache = PooledCache(head.stack.pool)
        self.slots = self.first = 0  # cache slots that hold true features; where those of nodes begin
        self.places = [0]  # by node, where in the pool its feature is
        self.positions = [0]  # by node, the position of its pair
        self.sees: list[list[int]] = [[]]  # by node, the slots after the text that it sees
        self.logits: Tensor | None = None  # after what was read of the text

    def room(self) -> int:
        return self.scratch - (len(self.positions) - 1)

    def clear(self) -> None:
        del self.places[1:], self.positions[1:], self.sees[1:]

    def close(self) -> None:
        self.cache.release()

    def take(self, most: int) -> tuple[Tensor, Rows]:
        """Return the next unread positions of the text, at most `most`: their true features and their rows."""
        start, features, tokens = self._unread[0]
        return features[:most], self.rows_of(start, tokens[:most])

    def rows_of(self, start: int, tokens: list[int]) -> Rows:
        """Return the rows of the next positions of the text, from `start` on."""
        slots, positions = range(self.slots, self.slots + len(tokens)), list(range(start, start + len(tokens)))
        return Rows(self.cache, self.slots, tokens, positions, [s + 1 for s in slots], [[]] * len(tokens))

    def took(self, rows: Rows) -> None:
        """Note that the head has read these positions."""
        start, features, tokens = self._unread.pop(0)
        count = len(rows)
        if count < len(tokens):
            self._unread.insert(0, (start + count, features[count:], tokens[count:]))
        self._end_at(rows)
        self.first = self.slots

    def _end_at(self, rows: Rows) -> None:
        """Note that the text ends with these rows."""
        self.slots += len(rows)
        self.places[0], self.positions[0] = rows.slots[-1], rows.positions[-1]

    def has_read_behind(self, most: int, logits: Tensor) -> None:
        """Note that a device has read what is unread (`drafters.heads.growth.ahead`): the nodes begin behind the `most`
        slots that it may have taken. logits: after the text.
        """
        start, _, tokens = self._unread.pop()
        self.first = self.slots + most
        self._end_at(self.rows_of(start, tokens))
        self.logits = logits

    def grow(self, parents: list[int], tokens: list[int]) -> Rows:
        """Add nodes, and return their rows."""
        place = self.first + len(self.positions) - 1
        self.positions += [self.positions[parent] + 1 for parent in parents]
        self.sees += [[*self.sees[parent], place + row] for row, parent in enumerate(parents)]
        n = len(tokens)
        self.cache.reserve(place + n)
        rows = Rows(self.cache, place, tokens, self.positions[-n:], [self.slots] * n, self.sees[-n:])
        self.places += rows.slots
        return rows
