"""From scores to acceptance probabilities: how often the target accepted each kind of draft.

A kind is (depth, bucket); the bucket is that of a score or of a match's length. Its probability is the observed
acceptance shrunk towards a prior. Old observations fade, so it falls when a drafter stops being right.
"""

from __future__ import annotations

from engine.costs.faded_mean import FadedMean

DEEPEST = 8  # depths from here on are one kind


class Calibrator:
    """Learns how often nodes are accepted. prior_weight: observations that the prior counts for. memory: observations
    after which old ones fade.
    """

    def __init__(self, prior_weight: float = 8.0, memory: float = 2000.0):
        self.prior_weight, self.memory = prior_weight, memory
        self._accepted: dict[tuple[int, int], FadedMean] = {}

    def prob(self, depth: int, bucket: int, prior: float) -> float:
        """Return the probability that a node of this kind is accepted if its parent is. prior: before observations."""
        accepted = self._accepted.get((min(depth, DEEPEST), bucket))
        return prior if accepted is None else accepted.mean(prior, self.prior_weight)

    def observe(self, depth: int, bucket: int, accepted: bool) -> None:
        """Learn that a node of this kind, below an accepted parent, was accepted or not."""
        kind = (min(depth, DEEPEST), bucket)
        if kind not in self._accepted:
            self._accepted[kind] = FadedMean(self.memory, full=self.memory)
        self._accepted[kind].observe(accepted)
