"""How well a head predicts, by draft position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Score:
    """Per draft position: tokens predicted, first guesses that were right, summed loss. The sums stay on the device
    until they are read, since reading one waits for the device.
    """

    count: list[int] = field(default_factory=list)
    _sums: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, step: int, count: int, hits: Tensor, loss: Tensor) -> None:
        """Count a step. hits: of `count` first guesses; loss: their mean."""
        hits, loss = hits.detach(), loss.detach().double() * count
        if step == len(self.count):
            self.count.append(count)
            self._sums.append((hits, loss))
            return
        self.count[step] += count
        before = self._sums[step]
        self._sums[step] = before[0] + hits, before[1] + loss

    @property
    def hits(self) -> list[int]:
        return [int(hits) for hits, _ in self._sums]

    @property
    def loss(self) -> list[float]:
        return [float(loss) for _, loss in self._sums]

    def acceptance(self) -> list[float]:
        """Return the share of right first guesses per position, given right tokens before it."""
        return [hits / max(count, 1) for hits, count in zip(self.hits, self.count, strict=True)]

    def mean_loss(self) -> float:
        """Return the mean loss over all positions together."""
        return sum(self.loss) / max(1, sum(self.count))

    def chain_length(self) -> float:
        """Return the expected tokens per round of a drafted chain, bonus included."""
        acceptance = self.acceptance()
        return 1 + sum(math.prod(acceptance[: k + 1]) for k in range(len(acceptance)))
