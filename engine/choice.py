"""Two ways of going on, tried in turns: the one that brings more is gone, and the other tried again now and then.

For questions whose answer nobody can work out beforehand, because the ways compete for cores or caches.
"""

from __future__ import annotations

_TRIED = 3  # blocks of each way before they are compared
_RETRIED = 16  # blocks until the other way is tried again, twice as many each time that this changes nothing
_SELDOM = 8  # times as long, at most
_KEPT = 0.95  # of what was measured, with every block


class Choice:
    """second: whether the second way is gone. settled: it stays as it is.

    block: rounds in a row that one way is gone; the first does not count, since it still pays for the change. first:
    rounds before anything counts. gain: the share of the first way's time for which the second has to bring as much.
    """

    def __init__(self, block: int, first: int = 0, gain: float = 1.0, second: bool = False, settled: bool = False):
        self.block, self.gain, self.second, self.settled = block, gain, second, settled
        self._rounds, self._blocks = -first, 0
        self._next_trial, self._interval, self._better = 2 * _TRIED + _RETRIED, _RETRIED, False
        self._brought, self._taken = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

    def observe(self, brought: float, taken: float) -> bool:
        """A round brought so much, in so much time. Returns whether the way changes."""
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
