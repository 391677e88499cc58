"""Who runs when: drafter and verifier in turns, or both at once, and whether the verifier ever waits for a draft."""

from __future__ import annotations

from typing import Literal

Mode = Literal["sequential", "async", "auto"]

TRIED_ROUNDS = 16  # of one mode in a row, while `auto` compares them
TRIED_TURNS = 3  # of each mode
_GAIN = 0.97  # drafting ahead must take less than this share of the time in turns for a token

TRIED_MISSES = 8  # answered in each way before they are compared
_RETRIED = 32  # misses after which the other way is tried once more
_KEPT = 0.98  # of what was measured, with every miss


class Pace:
    """The mode under way. alone, beside: threads of the target while the drafter rests, and while it works.

    `auto` lets the modes take turns for some rounds and stays with what takes less time a token.
    """

    def __init__(self, mode: Mode, alone: int, beside: int):
        self.alone, self.beside = alone, beside
        self.ahead = mode == "async"
        self._undecided = mode == "auto"
        self._rounds = 0
        self._tokens, self._seconds = {False: 0, True: 0}, {False: 0.0, True: 0.0}

    @property
    def threads(self) -> int:
        return self.beside if self.ahead else self.alone

    def observe(self, tokens: int, round_s: float) -> bool:
        """A round with a drafter took so long for so many tokens. Returns whether `ahead` has changed."""
        if not self._undecided:
            return False
        before = self.ahead
        self._rounds += 1
        if self._rounds % TRIED_ROUNDS != 1:  # the first still pays for the change
            self._tokens[before] += tokens
            self._seconds[before] += round_s
        if self._rounds == 2 * TRIED_TURNS * TRIED_ROUNDS:
            in_turns, ahead = (self._seconds[mode] / self._tokens[mode] for mode in (False, True))
            self._undecided, self.ahead = False, ahead < _GAIN * in_turns
        elif self._rounds % TRIED_ROUNDS == 0:
            self.ahead = not before
        return self.ahead != before


class MissPolicy:
    """What to do when no draft is there for the outcome that came true: wait for one, or verify the root alone while
    the drafter is at work, and find a draft for the next outcome.

    Both are tried; what then brings more tokens a second, from one miss to the next, is done. alone: the present way.
    """

    def __init__(self) -> None:
        self.alone = False
        self._misses = 0
        self._tokens, self._seconds = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

    def observe(self, tokens: int, round_s: float) -> None:
        """A round after the latest miss took so long for so many tokens."""
        self._tokens[self.alone] += tokens
        self._seconds[self.alone] += round_s

    def decide(self) -> bool:
        """A miss: whether to go on alone."""
        self._misses += 1
        for sums in (self._tokens, self._seconds):
            sums[False] *= _KEPT
            sums[True] *= _KEPT
        if self._misses <= 2 * TRIED_MISSES:
            self.alone = self._misses % 2 == 0
        else:
            better = self._tokens[True] * self._seconds[False] > self._tokens[False] * self._seconds[True]
            self.alone = better != (self._misses % _RETRIED == 0)
        return self.alone
