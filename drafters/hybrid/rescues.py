"""What a head brings beside retrieval, learned from verdicts: tokens that retrieval alone would not have had."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

_HOPED = 0.6  # chance before any was seen
_PRIOR = 4.0  # misses, or drafts, that what was expected before counts for
_KEPT = 0.95  # share of a request's observations that is kept with every new one
_KEPT_OF_ALL = 0.99

NOTHING = 0.3
"""Tokens that retrieval is expected to have accepted, up to which it has next to nothing."""

_EDGES = (NOTHING, 0.7, 1.5, 3.0)  # of these tokens
_HOPED_GAIN = 1.0  # of a draft, before any was seen


@dataclass
class _Mean:
    """Faded sums: accepted tokens of the head, and of what these are counted for."""

    gained: float = 0.0
    count: float = 0.0

    def learn(self, gained: float, count: float, kept: float) -> None:
        self.gained = kept * self.gained + gained
        self.count = kept * self.count + count

    def value(self, prior: float) -> float:
        return (self.gained + _PRIOR * prior) / (self.count + _PRIOR)


class Rescues:
    """Tokens of the head for each that retrieval was expected to miss, of every request; a request begins with the mean
    of all.
    """

    def __init__(self) -> None:
        self._all = _Mean()
        self._requests: dict[int, _Mean] = {}

    def start(self, request: int) -> None:
        self._requests[request] = _Mean()

    def finish(self, request: int) -> None:
        self._requests.pop(request, None)

    def of(self, request: int) -> float:
        """Accepted tokens that the head is expected to yield for each token that retrieval misses."""
        return self._requests[request].value(self._all.value(_HOPED))

    def learn(self, request: int, rescued: float, misses: float) -> None:
        """Drafts of the head brought so many accepted tokens, where retrieval was expected to miss so many."""
        self._all.learn(rescued, misses, _KEPT_OF_ALL)
        self._requests[request].learn(rescued, misses, _KEPT)


class Gains:
    """Tokens that a draft of the head brings, by how many retrieval's own is expected to. What was seen fades with
    every draft, so a kind of round in which the head was given up is tried again after many others.
    """

    def __init__(self) -> None:
        self._means = [_Mean() for _ in range(len(_EDGES) + 1)]

    def of(self, retrieved: float) -> float:
        """The gain where retrieval is expected to have so many tokens accepted."""
        return self._means[bisect_right(_EDGES, retrieved)].value(_HOPED_GAIN)

    def learn(self, retrieved: float, gained: float) -> None:
        """A draft gained so much where retrieval was expected to have `retrieved` tokens accepted."""
        for index, mean in enumerate(self._means):
            is_kind = index == bisect_right(_EDGES, retrieved)
            mean.learn(gained * is_kind, is_kind, _KEPT_OF_ALL)
