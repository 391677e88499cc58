"""From scores to acceptance probabilities: what each kind of draft was worth when the target looked at it.

A kind is (source, depth, bucket), the bucket being a score's or a match's length. Its chance is the observed acceptance
pulled towards a prior; old observations fade, so that a source that stops being right fades too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.tree import TokenTree

DEEPEST = 8  # depths from here on are one kind


class _Cell(msgspec.Struct, array_like=True):
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

    def save(self, path: Path) -> None:
        """Write the counts, all or nothing."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(list(self._cells.values())))
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Take over the counts of a file that `save` wrote."""
        try:
            cells = msgspec.json.decode(path.read_bytes(), type=list[_Cell])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"calibration={path}: cannot be read ({error}): delete it to start afresh") from None
        self._cells = {(cell.source, cell.depth, cell.bucket): cell for cell in cells}


def score_bucket(score: float) -> int:
    """Ten kinds of score between 0 and 1."""
    return min(int(score * 10), 9)


def _steps(tree: TokenTree) -> list[float]:
    """c(v)/c(parent) of every node."""
    confidence, parents = tree.confidence.tolist(), tree.parents.tolist()
    above = [confidence[parent] if parent >= 0 else 1.0 for parent in parents]
    return [c / a if a > 0 else 0.0 for c, a in zip(confidence, above, strict=True)]
