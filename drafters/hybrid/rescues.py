"""What a head brings beside retrieval: accepted tokens for each that retrieval was expected to miss."""

from __future__ import annotations

from dataclasses import dataclass

_HOPED = 0.6  # before any was seen
_PRIOR = 4.0  # misses that the mean of all requests counts for in each
_KEPT = 0.95  # share of a request's observations that is kept with every new one
_KEPT_OF_ALL = 0.99


@dataclass
class _Sums:
    """Faded sums: accepted tokens of the head, and expected misses of retrieval where it was asked."""

    rescued: float = 0.0
    misses: float = 0.0

    def learn(self, rescued: float, misses: float, kept: float) -> None:
        self.rescued = kept * self.rescued + rescued
        self.misses = kept * self.misses + misses

    def mean(self, prior: float) -> float:
        return (self.rescued + _PRIOR * prior) / (self.misses + _PRIOR)


class Rescues:
    """Tokens of the head for each miss, of every request; a request begins with the mean of all."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._requests: dict[int, _Sums] = {}

    def start(self, request: int) -> None:
        self._requests[request] = _Sums()

    def finish(self, request: int) -> None:
        self._requests.pop(request, None)

    def of(self, request: int) -> float:
        """Accepted tokens that the head is expected to yield for each token that retrieval misses."""
        return self._requests[request].mean(self._all.mean(_HOPED))

    def learn(self, request: int, rescued: float, misses: float) -> None:
        """Drafts of the head brought so many accepted tokens, where retrieval was expected to miss so many."""
        self._all.learn(rescued, misses, _KEPT_OF_ALL)
        self._requests[request].learn(rescued, misses, _KEPT)
