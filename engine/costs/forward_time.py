"""The time of a forward, by its rows and the keys they see: measured at start-up and updated by every forward."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.costs.constants import LARGEST_ERROR, LATEST_ELSEWHERE, LATEST_ROUND

SIZES = (1, 4, 8, 16, 32, 48, 64, 128, 256)
"""Row counts at which a forward's time is known."""
_PASSES = 3  # start-up: passes over the sizes
_STEEP = 3.0  # start-up stops at the first size that takes this many times as long as the fastest
_SLOW_S = 0.02  # seconds: a forward that takes longer is disturbed little, so it is measured twice and no further
_MANY = 32  # most rows of the forwards that show what a key takes
_LONG = 1024  # past positions at which the time of a key is measured


class Attended(NamedTuple):
    """How many keys a forward attends to. read: of all requests, each once for all of its request's rows; seen: by all
    rows together.
    """

    read: float
    seen: float


NOTHING = Attended(0.0, 0.0)


class ForwardTime:
    """t(rows, keys).

    seconds: time of a forward by row count, without keys. read_s, seen_s: time of a key for its request, and for each
    row that sees it. forward_sizes: row counts are padded up to the next of these sizes, and more rows run in slices of
    the last, so the time is a staircase.
    """

    def __init__(
        self, seconds: dict[int, float], read_s: float = 0.0, seen_s: float = 0.0, forward_sizes: Sequence[int] = (1,)
    ):
        self._steps = (0, *forward_sizes)
        least_s: dict[int, float] = {}  # by the rows that are computed
        for size, taken_s in seconds.items():
            least_s[self._filled(size)] = min(taken_s, least_s.get(self._filled(size), taken_s))
        self._sizes = sorted(least_s)
        self._seconds, self.read_s, self.seen_s = [least_s[size] for size in self._sizes], read_s, seen_s
        self._least = _rising(self._seconds)

    @classmethod
    def measure(
        cls,
        forward_s: Callable[[int, int], float],
        largest: int,
        longest: int = _LONG,
        forward_sizes: Sequence[int] = (1,),
    ) -> ForwardTime:
        """Measure forwards. forward_s: called with rows and past positions, runs such a forward and returns its time.
        longest: the most past positions that it can run after. forward_sizes: as the class has it.
        """
        seconds: dict[int, float] = {}
        for size in [size for size in sorted({*SIZES, *forward_sizes}) if size < largest] + [largest]:
            first_s = forward_s(size, 0)  # includes the one-time setup of a size's first forward
            seconds[size] = min(first_s, forward_s(size, 0))
            if seconds[size] > _STEEP * min(seconds.values()):
                break
        # The sizes take turns, so that other load (the drafter is loading) does not fall on a single size.
        quick = [size for size, taken_s in seconds.items() if taken_s < _SLOW_S]
        for _ in range(_PASSES):
            for size in quick:
                seconds[size] = min(seconds[size], forward_s(size, 0))
        if not (long := min(longest, _LONG)):
            return cls(seconds, forward_sizes=forward_sizes)
        few = min(seconds)
        many = max(size for size in seconds if size <= max(_MANY, few))
        return cls(seconds, *_key_seconds(forward_s, few, many, long, _PASSES if quick else 1), forward_sizes)

    # These are called several times a round on few numbers: plain Python, since numpy takes ten times as long.

    def seconds(self, rows: int, keys: Attended = NOTHING) -> float:
        """Return t(rows, keys). It is linear between two sizes and proportional beyond the largest. Larger sizes cost
        no less than smaller ones.
        """
        rows = self._filled(rows)
        above, near = self._place(rows)
        below_s, above_s = self._least[max(0, above - 1)], self._least[above]
        keys_s = self.read_s * keys.read + self.seen_s * keys.seen
        return (below_s + near * (above_s - below_s)) * max(1.0, rows / self._sizes[-1]) + keys_s

    def seconds_of(self, rows: NDArray[np.int64], keys_each: float) -> NDArray[np.float64]:
        """Return [n] float64: `seconds` for each of many row counts, every row of which sees `keys_each` keys, less
        what the requests' keys take once.
        """
        whole, rest = np.divmod(rows, self._steps[-1])
        filled = whole * self._steps[-1] + np.array(self._steps)[np.searchsorted(self._steps, rest)]
        forward_s = np.interp(filled, self._sizes, self._least) * np.maximum(1.0, filled / self._sizes[-1])
        taken_s: NDArray[np.float64] = forward_s + self.seen_s * keys_each * rows
        return taken_s

    def observe(self, rows: int, keys: Attended, seconds: float) -> None:
        """Learn from a forward that took `seconds`."""
        error = max(-LARGEST_ERROR, min(LARGEST_ERROR, seconds / self.seconds(rows, keys) - 1))
        above, near = self._place(rows)
        weights = [LATEST_ELSEWHERE] * len(self._sizes)
        weights[above] += (LATEST_ROUND - LATEST_ELSEWHERE) * near
        weights[max(0, above - 1)] += (LATEST_ROUND - LATEST_ELSEWHERE) * (1 - near)
        self._seconds = [size_s * (1 + weight * error) for size_s, weight in zip(self._seconds, weights, strict=True)]
        self._least = _rising(self._seconds)

    def _place(self, rows: int) -> tuple[int, float]:
        """Return the index of the next larger size, or the largest, and how far `rows` is on the way to it, 0 to 1."""
        rows = self._filled(rows)
        above = min(bisect_left(self._sizes, rows), len(self._sizes) - 1)
        if not above or rows >= self._sizes[above]:
            return above, 1.0
        below = self._sizes[above - 1]
        return above, (rows - below) / (self._sizes[above] - below)

    def _filled(self, rows: int) -> int:
        """Return the rows that a forward over `rows` rows computes."""
        whole, rest = divmod(rows, self._steps[-1])
        return whole * self._steps[-1] + self._steps[bisect_left(self._steps, rest)]


def _key_seconds(
    forward_s: Callable[[int, int], float], few: int, many: int, long: int, passes: int
) -> tuple[float, float]:
    """Return the time of a key for its request, and for each row that sees it, by forwards of `few` and of `many` rows
    after no text and after `long` positions.
    """
    kinds = [(rows, past) for past in (0, long) for rows in sorted({few, many})]
    taken_s = [[forward_s(*kind) for kind in kinds] for _ in range(passes)]
    least_s = dict(zip(kinds, map(min, zip(*taken_s, strict=True)), strict=True))
    few_s, many_s = (max(0.0, least_s[rows, long] - least_s[rows, 0]) for rows in (few, many))
    # From one row count alone, every row is thought to cost as much: the cautious guess.
    seen_s = max(0.0, many_s - few_s) / (many - few) if many > few else few_s / few
    return max(0.0, few_s - few * seen_s) / long, seen_s / long


def _rising(seconds: Sequence[float]) -> list[float]:
    """Return the numbers, each lowered to the smallest that follows it, so that they never decrease."""
    return [*accumulate(reversed(seconds), min)][::-1]
