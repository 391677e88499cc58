"""Choices by trial, for questions that cannot be answered beforehand: what a draft gains depends on the text, and
workers compete for cores and caches.

`TwoOptionTrial` chooses between two options: it keeps the one that yields more and retries the other at growing
intervals.

`ConservativeBandit` (Wu et al. 2016) uses an option only as far as it cannot lose much to doing without it. The options
are a request's drafts, retrieval's and a draft model's. A draft is made if the tokens that it is expected to gain are
worth more than its time. Each request counts its own rounds, and begins with the mean of other requests. Before there
is any, the time of a draft alone decides: a draft that costs little begins at once, one that costs much is tried only
as often as trials lose a small share of the emitted tokens.
"""

from __future__ import annotations

from engine.costs.constants import ANSWER_LOSES, GAIN_AT_FIRST, MEMORY, PRIOR_ROUNDS, TRIALS_LOSE
from engine.costs.faded_mean import FadedMean

_TRIED = 3  # blocks of each option before they are compared
_RETRIED = 16  # blocks until the other option is retried, doubled each time that the retry changes nothing
_SELDOM = 8  # times `_RETRIED` is the longest interval
_KEPT = 0.95  # share of earlier measurements kept with every block


class TwoOptionTrial:
    """Chooses between two options by what they yield.

    second: whether the second option is in use. settled: the choice is fixed.

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
        """Learn that a round yielded `brought` in `taken` time, and return whether the choice changes."""
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


class Experience:
    """What drafts of one kind have gained all requests so far, and what they take.

    gained: tokens of a round. draft_s: time of a draft; read_s: of a position that the draft model has yet to read.
    spare: tokens that the next trial may lose.
    """

    def __init__(self, draft_s: float = 0.0, read_s: float = 0.0):
        self.draft_s, self.read_s = draft_s, read_s
        self.gained = FadedMean(MEMORY, MEMORY, PRIOR_ROUNDS * GAIN_AT_FIRST, PRIOR_ROUNDS)
        self.spare = 0.0

    def observe(self, gained: float, seconds: float, reading: int = 0) -> None:
        """Learn that a draft gained `gained` tokens and took `seconds`, including the reading of `reading`
        positions.
        """
        self.gained.observe(gained)
        if reading:
            self.read_s += (max(0.0, seconds - self.draft_s) / reading - self.read_s) / MEMORY
        else:
            self.draft_s += (seconds - self.draft_s) / MEMORY


class ConservativeBandit:
    """Whether one request's drafts of one kind are made. All numbers are in tokens."""

    def __init__(self) -> None:
        self._gained = FadedMean(MEMORY)
        self._balance = ANSWER_LOSES  # gains less costs, in tokens of plain decoding
        self._on_trial = False

    def expected(self, shared: Experience) -> float:
        """Return the gain of the next draft."""
        return self._gained.mean(shared.gained.mean(), PRIOR_ROUNDS)

    def pays(self, shared: Experience, cost: float) -> bool:
        """Return whether a draft that costs so much is made because it is expected to pay, and not on trial."""
        return self._balance > 0 and self.expected(shared) > cost

    def takes(self, shared: Experience, cost: float, emitted: int, entry: float = 0.0, rounds: float = 1.0) -> bool:
        """Return whether the next draft is made, after a round that emitted so many tokens. cost: of its time; entry:
        of reading the text first, which pays for itself over `rounds` rounds.
        """
        expected, self._on_trial = self.expected(shared), False
        self._balance += TRIALS_LOSE * emitted
        if self.pays(shared, cost + entry / rounds):
            return True
        price = cost + entry - min(0.0, expected)
        shared.spare = min(shared.spare, price)  # nothing is saved up for a second trial
        self._on_trial = shared.spare >= price
        shared.spare += -price if self._on_trial else TRIALS_LOSE * emitted
        return self._on_trial

    def observe(self, shared: Experience, gained: float, net: float) -> None:
        """Learn that a draft gained `gained` tokens. net: these less its cost, in tokens of plain decoding."""
        self._gained.observe(gained)
        self._balance += net
        if self._on_trial:
            shared.spare += max(0.0, gained)
        self._on_trial = False
