"""Who runs when: drafter and verifier in turns, or both at once, and whether the verifier ever waits for a draft."""

from __future__ import annotations

from typing import Literal

Mode = Literal["sequential", "async", "auto"]

FIRST_ROUNDS = 24  # in which a drafter may still be trying things itself; they do not count
TRIED_ROUNDS = 16  # of one mode in a row, while `auto` compares them
TRIED_TURNS = 3  # of each mode
_GAIN = 0.97  # drafting ahead must take less than this share of the time in turns for a token
_WORTH = 0.2  # of a round: a shorter wait for the draft is not worth trying to avoid, it would cost the target a core
_SELDOM = 8  # times as long, at most, between trials of the other way as at first


class Pace:
    """The mode under way. alone, beside: threads of the target while the drafter rests, and while it works.

    `auto` lets the modes take turns for some rounds and stays with what takes less time a token. Where drafts take so
    little time that there is nothing to gain, it does not try.
    """

    def __init__(self, mode: Mode, alone: int, beside: int):
        self.alone, self.beside = alone, beside
        self.ahead = mode == "async"
        self._undecided = mode == "auto"
        self._rounds = -FIRST_ROUNDS
        self._waited_s = 0.0
        self._tokens, self._seconds = {False: 0, True: 0}, {False: 0.0, True: 0.0}

    @property
    def threads(self) -> int:
        return self.beside if self.ahead else self.alone

    def observe(self, tokens: int, round_s: float, forward_s: float) -> bool:
        """A round with a drafter took so long for so many tokens, of which the target's forward took `forward_s`.
        Returns whether `ahead` has changed.
        """
        self._rounds += self._undecided
        if not self._undecided or self._rounds <= 0:
            return False
        before = self.ahead
        if self._rounds % TRIED_ROUNDS != 1:  # the first still pays for the change
            self._tokens[before] += tokens
            self._seconds[before] += round_s
            self._waited_s += round_s - forward_s
        if self._rounds == TRIED_ROUNDS and self._waited_s < _WORTH * self._seconds[False]:
            self._undecided = False
        elif self._rounds == 2 * TRIED_TURNS * TRIED_ROUNDS:
            in_turns, ahead = (self._seconds[mode] / self._tokens[mode] for mode in (False, True))
            self._undecided, self.ahead = False, ahead < _GAIN * in_turns
        elif self._rounds % TRIED_ROUNDS == 0:
            self.ahead = not before
        return self.ahead != before


class Choice:
    """Two ways of going on; both are tried, then that is done which brings more tokens a second.

    tried: decisions for each way before they are compared. retried: decisions after which the other way is tried once
    more, twice as many each time that changes nothing. kept: of what was measured, with every decision. second: whether
    the second way is being gone.
    """

    def __init__(self, tried: int, retried: int, kept: float):
        self.tried, self.retried, self.kept = tried, retried, kept
        self.second = False
        self._decisions, self._interval, self._better = 0, retried, False
        self._next_trial = 2 * tried + retried
        self._tokens, self._seconds = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

    def observe(self, tokens: int, seconds: float) -> None:
        """What has come of the latest decision so far."""
        self._tokens[self.second] += tokens
        self._seconds[self.second] += seconds

    def decide(self) -> bool:
        """Whether to go the second way from here on."""
        self._decisions += 1
        for sums in (self._tokens, self._seconds):
            sums[False] *= self.kept
            sums[True] *= self.kept
        if self._decisions <= 2 * self.tried:
            self.second = self._decisions % 2 == 0
        else:
            self.second = self._compare()
        return self.second

    def _compare(self) -> bool:
        better = self._tokens[True] * self._seconds[False] > self._tokens[False] * self._seconds[True]
        if better != self._better:
            self._better, self._interval = better, self.retried
        trial = self._decisions >= self._next_trial
        if trial:
            self._interval = min(2 * self._interval, _SELDOM * self.retried)
            self._next_trial = self._decisions + self._interval
        return better != trial
