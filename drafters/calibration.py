"""From scores to acceptance probabilities: how often the target accepted each kind of draft.

A kind is (depth, bucket); the bucket is that of a score or of a match's length. Its chance is the observed acceptance
shrunk towards a prior. Old observations fade, so the chance falls when a drafter stops being right.
"""

from __future__ import annotations

from dataclasses import dataclass

DEEPEST = 8  # depths from here on are one kind


@dataclass
class _Cell:
    """Faded counts of one kind."""

    depth: int
    bucket: int
    accepted: float = 0.0
    seen: float = 0.0


class Calibrator:
    """prior_weight: observations that the prior counts for. memory: observations after which old ones fade."""

    def __init__(self, prior_weight: float = 8.0, memory: float = 2000.0):
        self.prior_weight, self.memory = prior_weight, memory
        self._cells: dict[tuple[int, int], _Cell] = {}

    def prob(self, depth: int, bucket: int, prior: float) -> float:
        """The chance that a node of this kind is accepted if its parent is. prior: the estimate before observations."""
        cell = self._cells.get((min(depth, DEEPEST), bucket))
        if cell is None:
            return prior
        return (cell.accepted + self.prior_weight * prior) / (cell.seen + self.prior_weight)

    def observe(self, depth: int, bucket: int, accepted: bool) -> None:
        """A node of this kind, below an accepted parent, was accepted or not."""
        key = (min(depth, DEEPEST), bucket)
        cell = self._cells.setdefault(key, _Cell(*key))
        if cell.seen >= self.memory:
            cell.accepted *= 1 - 1 / self.memory
            cell.seen *= 1 - 1 / self.memory
        cell.accepted += accepted
        cell.seen += 1
