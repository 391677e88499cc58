"""A budget of minutes, spent where another measurement narrows an interval most."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ..report.ratios import width

NARROW = 0.05
"""An interval of this share of its median is narrow enough."""
LEAST = 4  # questions of each suite before its intervals count

Asked = TypeVar("Asked")
Ratios = Mapping[str, Sequence[float]]
"""Each contestant's ratios to plain decoding."""


class Budget:
    """The time that a measurement may take. minutes: None means as long as it takes."""

    def __init__(self, minutes: float | None):
        self._ends = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def bounded(self) -> bool:
        return self._ends is not None

    @property
    def spent(self) -> bool:
        return self._ends is not None and time.monotonic() >= self._ends

    def share(self, parts: int) -> Budget:
        """Return an even share of what is left, for the first of `parts` parts."""
        return Budget(None if self._ends is None else max(0.0, self._ends - time.monotonic()) / 60 / parts)


def is_narrow(ratios: Sequence[float]) -> bool:
    return len(ratios) >= LEAST and width(ratios) <= NARROW


def spend(
    questions: Mapping[str, Sequence[Asked]], ratios: Callable[[str], Ratios], budget: Budget
) -> Iterator[tuple[str, Asked, set[str]]]:
    """Yield the next suite and question, and the contestants whose interval there is narrow already, which may rest.

    The suites take turns. With a budget, once each was asked `LEAST` questions, the next comes from the suite where it
    narrows an interval most. Each suite is asked at least one question, whatever the budget.
    """
    waiting = {suite: iter(some) for suite, some in questions.items()}
    asked: Counter[str] = Counter(dict.fromkeys(questions, 0))
    gains: dict[str, float] = {}
    resting: dict[str, set[str]] = {suite: set() for suite in questions}
    while waiting:
        suite = min(waiting, key=lambda one: asked[one])
        if budget.spent and asked[suite]:
            return
        if budget.bounded and asked[suite] >= LEAST:
            suite = max(waiting, key=lambda one: gains[one])
            if not gains[suite]:
                return
        if (question := next(waiting[suite], None)) is None:
            del waiting[suite]
            continue
        yield suite, question, resting[suite]
        asked[suite] += 1
        if budget.bounded and asked[suite] >= LEAST:
            so_far = ratios(suite)
            resting[suite] = {name for name, some in so_far.items() if is_narrow(some)}
            gains[suite] = max(
                (width(some) / len(some) for n, some in so_far.items() if n not in resting[suite]), default=0
            )
