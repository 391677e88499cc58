"""What a draft head keeps of one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from drafters.heads.growth.policies import Candidates
from drafters.heads.growth.ranking import Ranking


class Unranked(NamedTuple):
    """What `Session.rank` is asked of a session."""

    session: Session
    ranking: Ranking
    nodes: list[int]
    logits: Tensor | None
    positions: list[int]


class Session(ABC):
    """One request's state in a head. Node 0 is the last synced token; other nodes are drafted below it.

    synced: features have been committed for this many positions of the text; the token at that index is node 0.
    Before the first commit it is 0 and there is no node. depth_limit: nodes this deep predict nothing.
    """

    synced: int = 0
    depth_limit: int | None = None

    @abstractmethod
    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        """Commit true features [m, layers, hidden] of the text's positions from `start` on, on the CPU or the head's
        device, always the same; tokens: the m that follow them. features is None for a head without `feature_layers`.

        Drops all drafted nodes. `start` is `synced` unless features were lost in between; the head then lacks them.
        """

    def count_unread(self) -> int:
        """Return the positions of the text that the next `root` reads first."""
        return 0

    @abstractmethod
    def root(self) -> Tensor | None:
        """Prepare to draft below node 0 and return its logits, [1, draft_vocab]; None where `rank` needs none."""

    def root_logits(self) -> Tensor:
        """Return node 0's logits, [1, draft_vocab], never None."""
        logits = self.root()
        assert logits is not None
        return logits

    @abstractmethod
    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor | None]:
        """Add nodes below known ones, in one forward: return their ids and logits, [n, draft_vocab] (or [1, ...] for
        all); None where `rank` needs none.
        """

    def rank(self, ranking: Ranking, nodes: list[int], logits: Tensor | None, positions: list[int]) -> Candidates:
        """Return what may follow these nodes. positions: of the tokens that they predict."""
        assert logits is not None
        return ranking(logits, positions)

    @abstractmethod
    def room(self) -> int:
        """Return how many more nodes can be drafted."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all nodes but node 0."""

    def close(self) -> None:  # noqa: B027
        """End the request."""


class JointSession(Session):
    """A session whose head computes the nodes of several sessions together, and so those of one."""

    head: Any

    def root(self) -> Tensor | None:
        logits: Tensor | None
        (logits,) = self.head.roots([self])
        return logits

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[list[int], Tensor | None]:
        extended: tuple[list[int], Tensor | None]
        (extended,) = self.head.extend([(self, parents, tokens)])
        return extended


class ReadingSession(Session):
    """A session that reads true features when a draft needs them: a verdict whose next tree is already drafted must not
    wait for that.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[int, Tensor, list[int]]] = []  # what was committed since a draft last needed it

    def commit(self, start: int, features: Tensor | None, tokens: list[int]) -> None:
        assert features is not None
        self._unread.append((start, features, tokens))
        self.synced = start + len(tokens)
        self.clear()

    def count_unread(self) -> int:
        return sum(len(tokens) for _, _, tokens in self._unread)

    @property
    def unread_tokens(self) -> list[int] | None:
        """The tokens of one verdict that is unread; None if there is none, or another before it."""
        return self._unread[0][2] if len(self._unread) == 1 else None
