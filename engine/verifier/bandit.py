"""Chooses between two options by trial: keeps the one that yields more and retries the other at growing intervals.

For questions that nobody can answer beforehand, because the options compete for cores or caches.
"""

from __future__ import annotations

_TRIED = 3  # blocks of each option before they are compared
_RETRIED = 16  # blocks until the other option is retried, doubled each time that the retry changes nothing
_SELDOM = 8  # times `_RETRIED` is the longest interval
_KEPT = 0.95  # share of earlier measurements kept with every block


class Bandit:
    """second: whether the second option is in use. settled: the choice is fixed.

    block: consecutive rounds of one option; the first is not counted, since it still pays for the switch. first: rounds
    before anything counts. gain: the second option must take less than this share of the first's time for the same
    yield.
    """

    def __init__(self, block: int, first: int = 0, gain: float = 1.0, second: bool = False, settled: bool = False):
        self.block, self.gain, self.second, self.settled = block, gain, second, settled
        self._rounds, self._blocks = -first, 0
        self._next_trial, self._interval, self._better = 2 * _TRIED + _RETRIED, _RETRIED, False
        self._brought, self._taken = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

    def observe(self, brought: float, taken: float) -> bool:
        """A round yielded `brought` in `taken` time. Returns whether the choice changes."""
        self._rounds += 1
        if self.settled or self._rounds <= 0:
            return False
        before = self.second
        if self._rounds % self.block != 1:
            self._brought[before] += brought
            self._taken[before] += taken
        if self._rounds % self.block == 0:
            self.second = self._next()
        return self.second != before

    def _next(self) -> bool:
        self._blocks += 1
        for sums in (self._brought, self._taken):
            sums[False] *= _KEPT
            sums[True] *= _KEPT
        if self._blocks < 2 * _TRIED:
            return not self.second
        better = self._brought[True] * self._taken[False] * self.gain > self._brought[False] * self._taken[True]
        if better != self._better:
            self._better, self._interval = better, _RETRIED
        trial = self._blocks >= self._next_trial
        if trial:
            self._interval = min(2 * self._interval, _SELDOM * _RETRIED)
            self._next_trial = self._blocks + self._interval
        return better != trial
