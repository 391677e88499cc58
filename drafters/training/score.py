"""How well a head predicts, by draft position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Score:
    """Per draft position: tokens predicted, first guesses that were right, summed loss."""

    count: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def add(self, step: int, count: int, hits: int, loss: float) -> None:
        while len(self.count) <= step:
            self.count.append(0)
            self.hits.append(0)
            self.loss.append(0.0)
        self.count[step] += count
        self.hits[step] += hits
        self.loss[step] += loss * count

    def acceptance(self) -> list[float]:
        """Share of right first guesses per position, given right tokens before it."""
        return [hits / max(count, 1) for hits, count in zip(self.hits, self.count, strict=True)]

    def mean_loss(self) -> float:
        """Over all positions together."""
        return sum(self.loss) / max(1, sum(self.count))

    def chain_length(self) -> float:
        """Expected tokens per round of a drafted chain, bonus included."""
        return 1 + sum(math.prod(self.acceptance()[: k + 1]) for k in range(len(self.count)))
