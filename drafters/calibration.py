"""From scores to acceptance probabilities: what each kind of draft was worth when the target looked at it.

A kind is (source, depth, bucket), the bucket being a score's or a match's length. Its chance is the observed acceptance
pulled towards a prior; old observations fade, so that a source that stops being right fades too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree

DEEPEST = 8  # depths from here on are one kind


@dataclass
class _Cell:
    """Faded counts of one kind."""

    source: int
    depth: int
    bucket: int
    accepted: float = 0.0
    seen: float = 0.0


class Calibrator:
    """prior_weight: observations that the prior counts for. memory: observations after which old ones fade."""

    def __init__(self, prior_weight: float = 8.0, memory: float = 2000.0):
        self.prior_weight, self.memory = prior_weight, memory
        self._cells: dict[tuple[int, int, int], _Cell] = {}

    def chance(self, source: int, depth: int, bucket: int, prior: float) -> float:
        """The chance that a node of this kind is accepted if its parent is. prior: the guess where nothing was seen."""
        cell = self._cells.get((source, min(depth, DEEPEST), bucket))
        if cell is None:
            return prior
        return (cell.accepted + self.prior_weight * prior) / (cell.seen + self.prior_weight)

    def observe(self, source: int, depth: int, bucket: int, accepted: bool) -> None:
        """A node of this kind, below an accepted parent, was accepted or not."""
        key = (source, min(depth, DEEPEST), bucket)
        cell = self._cells.setdefault(key, _Cell(*key))
        if cell.seen >= self.memory:
            cell.accepted *= 1 - 1 / self.memory
            cell.seen *= 1 - 1 / self.memory
        cell.accepted += accepted
        cell.seen += 1

    def apply(self, raw: TokenTree, source: int) -> TokenTree:
        """A tree whose confidence came from scores, with c(v) the product of its steps' calibrated chances."""
        steps, depths = _steps(raw), raw.depths.tolist()
        confidence = [1.0] * len(raw)
        for node in range(1, len(raw)):
            step = self.chance(source, depths[node], score_bucket(steps[node]), steps[node])
            confidence[node] = confidence[raw.parents[node]] * step
        return TokenTree.from_lists(raw.tokens.tolist(), raw.parents.tolist(), confidence, source)

    def learn(self, raw: TokenTree, source: int, tokens: Sequence[int]) -> None:
        """What a verdict that emitted `tokens` says about the tree that `apply` was given."""
        steps, node = _steps(raw), 0
        for depth, token in enumerate(tokens, start=1):
            for child in raw.children(node):
                self.observe(source, depth, score_bucket(steps[child]), int(raw.tokens[child]) == token)
            following = raw.child(node, token)
            if following is None:
                break
            node = following

    def table(self) -> list[dict[str, float]]:
        """One row for each kind seen: what a reliability diagram shows."""
        return [
            {
                "source": c.source,
                "depth": c.depth,
                "bucket": c.bucket,
                "seen": c.seen,
                "acceptance": c.accepted / c.seen,
            }
            for c in sorted(self._cells.values(), key=lambda c: (c.source, c.depth, c.bucket))
        ]

    def cells(self) -> NDArray[np.float64]:
        """[kinds, 5]: source, depth, bucket and the faded counts of accepted and seen, to be kept."""
        rows = [[c.source, c.depth, c.bucket, c.accepted, c.seen] for c in self._cells.values()]
        return np.asarray(rows, np.float64).reshape(-1, 5)

    def recall(self, cells: NDArray[np.float64]) -> None:
        """Take over what `cells` gave; ValueError if it cannot have."""
        if cells.ndim != 2 or cells.shape[1] != 5 or not (cells[:, 3] >= 0).all() or (cells[:, 3] > cells[:, 4]).any():
            raise ValueError("counts that no calibrator has")
        for source, depth, bucket, accepted, seen in cells.tolist():
            key = (int(source), int(depth), int(bucket))
            self._cells[key] = _Cell(*key, accepted, seen)


def score_bucket(score: float) -> int:
    """Ten kinds of score between 0 and 1."""
    return min(int(score * 10), 9)


def _steps(tree: TokenTree) -> list[float]:
    """c(v)/c(parent) of every node."""
    confidence, parents = tree.confidence.tolist(), tree.parents.tolist()
    above = [confidence[parent] if parent >= 0 else 1.0 for parent in parents]
    return [c / a if a > 0 else 0.0 for c, a in zip(confidence, above, strict=True)]
