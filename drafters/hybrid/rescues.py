"""What a head brings beside retrieval, learned from verdicts: tokens that retrieval alone would not have had."""

from __future__ import annotations

from bisect import bisect_right

from engine.costs.constants import (
    HEAD_GAIN_AT_FIRST,
    MEMORY,
    MEMORY_OF_RESCUES,
    NEXT_TO_NOTHING,
    PRIOR_ROUNDS,
    RESCUES_AT_FIRST,
)
from engine.costs.faded_mean import FadedMean

_EDGES = (NEXT_TO_NOTHING, 0.7, 1.5, 3.0)  # between kinds of rounds, in tokens that retrieval is expected to get


class Rescues:
    """Tokens that the head gains for each that retrieval was expected to miss, of every request; a request begins with
    the mean of all.
    """

    def __init__(self) -> None:
        self._all = FadedMean(MEMORY_OF_RESCUES)
        self._requests: dict[int, FadedMean] = {}

    def start(self, request: int) -> None:
        self._requests[request] = FadedMean(MEMORY)

    def finish(self, request: int) -> None:
        self._requests.pop(request, None)

    def expected(self, request: int) -> float:
        """Return the tokens that the head is expected to gain for each token that retrieval misses."""
        return self._requests[request].mean(self._all.mean(RESCUES_AT_FIRST, PRIOR_ROUNDS), PRIOR_ROUNDS)

    def observe(self, request: int, gained: float, missed: float) -> None:
        """Learn that drafts of the head gained so many tokens, where retrieval was expected to miss so many."""
        self._all.observe(gained, missed)
        self._requests[request].observe(gained, missed)


class Gains:
    """Tokens that a draft of the head gains, by how many retrieval's own is expected to get. What was seen fades with
    every draft, so a kind of round in which the head was given up is tried again after many others.
    """

    def __init__(self) -> None:
        self._means = [FadedMean(MEMORY_OF_RESCUES) for _ in range(len(_EDGES) + 1)]

    def expected(self, retrieved: float) -> float:
        """Return the gain where retrieval is expected to have so many tokens accepted."""
        return self._means[bisect_right(_EDGES, retrieved)].mean(HEAD_GAIN_AT_FIRST, PRIOR_ROUNDS)

    def observe(self, retrieved: float, gained: float) -> None:
        """Learn that a draft gained so much where retrieval was expected to have `retrieved` tokens accepted."""
        for kind, mean in enumerate(self._means):
            is_kind = kind == bisect_right(_EDGES, retrieved)
            mean.observe(gained * is_kind, is_kind)
