"""A mean that forgets: the one way in which everything that is learned of drafts is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FadedMean:
    """The mean of what was observed, in which later observations count more.

    memory: each new observation takes one part in so many off `total` and `count`, the faded sums, once the count has
    reached `full`.
    """

    memory: float
    full: float = 0.0
    total: float = 0.0
    count: float = 0.0

    def observe(self, value: float, count: float = 1.0) -> None:
        """Add `value`, the sum of `count` observations."""
        if self.count >= self.full:
            kept = 1 - 1 / self.memory
            self.total, self.count = kept * self.total, kept * self.count
        self.total += value
        self.count += count

    def mean(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """Return the mean, shrunk towards `prior`, which counts for `weight` observations."""
        return (self.total + weight * prior) / (self.count + weight)
