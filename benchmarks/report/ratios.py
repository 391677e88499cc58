"""The basis of every table's figures: a contestant's ratios to plain decoding, one for each prompt or repeat.

Two runs are compared on the pairs that both have: a median over other prompts is another figure, not noise.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from engine.core.errors import ConfigError

AGREE = 0.05
"""The ratios of two runs may be so far apart and still count as the same."""
_RESAMPLES = 2000
_LEAST = 3  # pairs that both runs must have before a difference is called a change

Where = tuple[str, str, str]
"""The measurement, its setting and the contestant."""
Ratios = Mapping[Where, Mapping[Hashable, float]]
"""Ratios by prompt, the median of its repeats; under load, by repeat."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the median, by bootstrap."""
    low, high = np.quantile(resampled(values), [0.025, 0.975])
    return float(low), float(high)


def resampled(values: Sequence[float], seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return medians of samples drawn with replacement: [resamples]."""
    sample = np.random.default_rng(seed).choice(np.asarray(values, float), (_RESAMPLES, len(values)))
    medians: np.ndarray[tuple[int], np.dtype[np.float64]] = np.median(sample, axis=1)
    return medians


def width(values: Sequence[float]) -> float:
    """Return the interval's width as a share of the median."""
    low, high = interval(values)
    return (high - low) / median(values)


class Agreement(NamedTuple):
    """A contestant in two runs. pairs: how many both have; one, other: medians of the ratios over these. changed: the
    interval of their quotients excludes 1.
    """

    where: Where
    one: float
    other: float
    pairs: int
    changed: bool

    @property
    def difference(self) -> float:
        return abs(self.one - self.other) / max(self.one, self.other)

    def __str__(self) -> str:
        return f"{self.other:.2f}x -> {self.one:.2f}x  {', '.join(self.where)} ({self.pairs} pairs)"


def agreements(one: Ratios, other: Ratios) -> list[Agreement]:
    """Return what both runs have, the most different first. other: the earlier run."""
    found = []
    for where, mine in one.items():
        if not (both := mine.keys() & other.get(where, {}).keys()):
            continue
        pairs = [(mine[key], other[where][key]) for key in both]
        low, high = interval([a / b for a, b in pairs])
        changed = len(pairs) >= _LEAST and not low <= 1 <= high
        found.append(Agreement(where, median(a for a, _ in pairs), median(b for _, b in pairs), len(pairs), changed))
    return sorted(found, key=lambda pair: -pair.difference)


def compared(one: Ratios, other: Ratios, folder: Path) -> Iterable[str]:
    """Say which share of two runs agrees, then what does not, then what changed by more than noise."""
    pairs = agreements(one, other)
    if not pairs:
        raise ConfigError(f"against={folder}: has no contestant and setting in common with this run")
    apart = [pair for pair in pairs if pair.difference > AGREE]
    yield f"{1 - len(apart) / len(pairs):.0%} of {len(pairs)} ratios agree within {AGREE:.0%}, over the pairs both have"
    yield from (f"{pair.difference:5.0%}  {pair}" for pair in apart)
    changed = [pair for pair in pairs if pair.changed]
    yield f"{len(changed)} ratios changed by more than their interval" + (":" if changed else "")
    yield from (f"{pair.one / pair.other - 1:+5.0%}  {pair}" for pair in changed)
