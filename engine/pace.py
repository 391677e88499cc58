"""Who runs when: drafter and verifier in turns, or both at once; and how many threads the target has in either case."""

from __future__ import annotations

import statistics
from typing import Literal

Mode = Literal["sequential", "async", "auto"]

TRIED_ROUNDS = 12  # in each mode before `auto` decides
_GAIN = 0.97  # drafting ahead must take less than this share of the time in turns: its trees are a little worse


class Pace:
    """The mode under way. alone, beside: threads of the target while the drafter rests, and while it works.

    `auto` runs some rounds in turns, some ahead, and stays with what takes less time a round.
    """

    def __init__(self, mode: Mode, alone: int, beside: int):
        self.alone, self.beside = alone, beside
        self.ahead = mode == "async"
        self._undecided = mode == "auto"
        self._rounds_s: dict[bool, list[float]] = {False: [], True: []}

    @property
    def threads(self) -> int:
        return self.beside if self.ahead else self.alone

    def observe(self, round_s: float) -> bool:
        """A round with a draft took so long. Returns whether `ahead` or `threads` have changed."""
        if not self._undecided:
            return False
        before = self.ahead
        self._rounds_s[self.ahead].append(round_s)
        if len(self._rounds_s[self.ahead]) == TRIED_ROUNDS:
            if self.ahead:
                in_turns, ahead = (statistics.median(self._rounds_s[mode][2:]) for mode in (False, True))
                self._undecided, self.ahead = False, ahead < _GAIN * in_turns
            else:
                self.ahead = True
        return self.ahead != before
