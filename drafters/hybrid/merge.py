"""Merges two sources' probabilities of a token into one.

A head's softmax and an index's counts are not on one scale, and agreement says more than either. So the probability of
a candidate is learned from verdicts for each pair (the head's, retrieval's). Until enough verdicts have come, the prior
is that a token is right unless both are wrong.
"""

from __future__ import annotations

from bisect import bisect_right

from drafters.calibration import Calibrator
from engine.core.outcomes import Following

_EDGES = (1e-6, 0.01, 0.03, 0.07, 0.15, 0.25, 0.4, 0.55, 0.7, 0.82, 0.91, 0.97)


class Merge:
    """The probability of a token, given the head's and retrieval's; None: that source has no prediction here."""

    def __init__(self) -> None:
        self.calibrator = Calibrator(prior_weight=20.0, memory=5000.0)

    def prob(self, model: float | None, memory: float | None) -> float:
        prior = 1 - (1 - (model or 0.0)) * (1 - (memory or 0.0))
        return self.calibrator.prob(0, _pair(model, memory), prior)

    def learn(self, model: float | None, memory: float | None, accepted: bool) -> None:
        self.calibrator.observe(0, _pair(model, memory), accepted)

    def candidates(self, model: Following | None, memory: Following) -> list[tuple[int, float | None, float | None]]:
        """Return every token that one of them proposes, with the probability that each gives it."""
        ours = dict(zip(*model, strict=True)) if model is not None else {}
        theirs = dict(zip(*memory, strict=True))
        unknown = None if model is None else 0.0
        unseen = 0.0 if theirs else None
        return [(token, ours.get(token, unknown), theirs.get(token, unseen)) for token in ours | theirs]

    def following(self, model: Following | None, memory: Following) -> Following:
        """Return the candidates of both, likeliest first."""
        found = [(self.prob(p, q), token) for token, p, q in self.candidates(model, memory)]
        found.sort(key=lambda candidate: -candidate[0])
        total = max(1.0, sum(prob for prob, _ in found))
        return [token for _, token in found], [prob / total for prob, _ in found]


def _pair(model: float | None, memory: float | None) -> int:
    return _bucket(model) * (len(_EDGES) + 2) + _bucket(memory)


def _bucket(prob: float | None) -> int:
    return 0 if prob is None else 1 + bisect_right(_EDGES, prob)
