"""What time buys: the one place where "is it worth it" is answered.

A forward over `rows` rows that see `keys` keys in all takes t(rows, keys) seconds: measured at start-up, kept up to
date by every forward. A round of R requests emits R * g tokens and takes the forward and some time around it, so a
second is worth rate(R) tokens; whatever brings more expected tokens than it costs at this rate is done. Probabilities
stay with their sources: the model is only told how many tokens are expected.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.choice import Choice
from engine.messages import Rates

SIZES = (1, 4, 8, 16, 32, 48, 64, 128, 256)
"""Rows at which a forward's time is known."""
_NEW = 0.1  # weight of the latest measurement
_CLIP = 0.25  # of one measurement's relative error: an interrupted forward must not make a size expensive for good
_ELSEWHERE = 0.03  # weight for the other sizes: what slows one forward slows them all
_PASSES, _REPEATED = 3, 64  # over the sizes up to this, at start-up
_STEEP = 6.0  # the first size that takes so many times as long as the fastest is the last that start-up tries
_SLOW_S = 0.5  # a size that takes longer is tried once or twice
_LONG = 512  # keys behind which the time that keys take is measured
_RETRIED = 0.99  # of what is held against drafts, with each round that does not wait for them
_HOPED = 0.5  # tokens that drafting for a request is thought to gain before it was seen
_LEAST_WAIT_S = 0.002
_CLEARLY = 0.97  # drafting ahead must take less than this share of the time in turns for a token
_WORTH = 0.2  # of a round outside of the forward: where it is less, drafting ahead is not worth a trial
_PAUSE = 2.0  # a round with a chunk of a prompt in it may take so many times as long as without


class CostModel:
    """t(rows, keys) and the rates that follow from it.

    seconds: of a forward over so many rows, keys left out. key_s: of one row looking at one key. ahead: whether drafts
    are made while rounds run, which takes cores from them, or in turns. rest: whether a draft model rests, so that
    retrieval or plain decoding goes on without it.
    """

    def __init__(self, seconds: dict[int, float], key_s: float = 0.0, mode: str = "sequential"):
        self._sizes = sorted(seconds)
        self._seconds, self._key_s = [seconds[size] for size in self._sizes], key_s
        self._least = _rising(self._seconds)
        self._plain_s = self._seconds  # as measured first: what is compared by it does not move it
        self.ahead = Choice(16, 24, _CLEARLY, second=mode == "async", settled=mode != "auto")
        self.rest = Choice(4)
        self._tokens = 1.0  # that a request emits in a round
        self._rows = 1.0  # that a request has in a round
        self._around_s = 0.0  # of a round, outside the forward
        self._gain = _HOPED  # tokens that drafting for a request brings, less what its rows cost
        self._wait_s = 0.0  # of a round for its drafts

    @classmethod
    def measure(cls, forward_s: Callable[[int, int], float], largest: int, mode: str = "sequential") -> CostModel:
        """forward_s: runs a forward over so many rows behind so many positions and returns its time."""
        seconds: dict[int, float] = {}
        for size in [size for size in SIZES if size < largest] + [largest]:
            seconds[size] = forward_s(size, 0)  # also makes what the first forward of a size has to make
            if seconds[size] > _STEEP * min(seconds.values()):
                seconds[size] = min(seconds[size], forward_s(size, 0))
                if seconds[size] > _STEEP * min(seconds.values()):
                    break
        # in turns, so that what else the machine does meanwhile (the drafter loads) does not fall on one size
        quick = [size for size, taken in seconds.items() if size <= _REPEATED and taken <= _SLOW_S]
        for _ in range(_PASSES):
            for size in quick:
                seconds[size] = min(seconds[size], forward_s(size, 0))
        rows = max((size for size in quick if size <= 32), default=min(seconds))
        pairs = [(forward_s(rows, 0), forward_s(rows, _LONG)) for _ in range(_PASSES if quick else 1)]
        short_s, long_s = map(min, zip(*pairs, strict=True))
        return cls(seconds, max(0.0, long_s - short_s) / (rows * _LONG), mode)

    # The forward. Several times in a round, on few numbers: in plain Python, which numpy takes ten times as long for.

    def seconds(self, rows: int, keys: float = 0.0) -> float:
        """t(rows, keys). keys: seen by all rows together. Between two sizes on a line, beyond the largest in proportion
        to it. Larger sizes cost no less than smaller ones.
        """
        above, near = self._place(rows)
        below_s, above_s = self._least[max(0, above - 1)], self._least[above]
        return (below_s + near * (above_s - below_s)) * max(1.0, rows / self._sizes[-1]) + self._key_s * keys

    def observe_forward(self, rows: int, keys: float, seconds: float) -> None:
        """A forward took so long."""
        error = max(-_CLIP, min(_CLIP, seconds / self.seconds(rows, keys) - 1))
        above, near = self._place(rows)
        weights = [_ELSEWHERE] * len(self._sizes)
        weights[above] += (_NEW - _ELSEWHERE) * near
        weights[max(0, above - 1)] += (_NEW - _ELSEWHERE) * (1 - near)
        self._seconds = [size_s * (1 + weight * error) for size_s, weight in zip(self._seconds, weights, strict=True)]
        self._least = _rising(self._seconds)

    def _place(self, rows: int) -> tuple[int, float]:
        """The index of the next larger size, or of the largest, and how far it is to it from the size below, 0 to 1."""
        above = min(bisect_left(self._sizes, rows), len(self._sizes) - 1)
        if not above or rows >= self._sizes[above]:
            return above, 1.0
        below = self._sizes[above - 1]
        return above, (rows - below) / (self._sizes[above] - below)

    # Rounds.

    def observe_round(self, requests: int, rows: int, tokens: int, around_s: float) -> None:
        """A round verified the trees of so many requests, `rows` nodes together, and emitted so many tokens.

        around_s: from the round before to this one's end, less the forward.
        """
        self._tokens += _NEW * (tokens / requests - self._tokens)
        self._rows += _NEW * (rows / requests - self._rows)
        self._around_s += _NEW * (around_s - self._around_s)

    def rate(self, requests: int) -> float:
        """Tokens a second that a round of so many requests brings at present."""
        rows = max(requests, round(requests * self._rows))
        return requests * self._tokens / (self.seconds(rows) + max(0.0, self._around_s))

    def rates(self, requests: int, alone: bool) -> Rates:
        """What the drafter is told. alone: the round to come verifies the root alone."""
        rows = requests if alone else max(requests, round(requests * self._rows))
        around_s = 0.0 if alone else max(0.0, self._around_s)
        return Rates(self.seconds(rows) + around_s, self._tokens, 1 / self.rate(requests))

    def nodes_worth(self, worth: NDArray[np.float32], requests: int, keys_each: float = 0.0) -> int:
        """How many of the nodes to verify. worth: [nodes] expected tokens of each, the most first; the first `requests`
        are the trees' roots, which are verified whatever they cost. keys_each: that one row sees on average.
        """
        rows = np.arange(requests, len(worth) + 1)
        expected = np.cumsum(worth, dtype=np.float64)[requests - 1 :]
        forward_s = np.interp(rows, self._sizes, self._least) * np.maximum(1.0, rows / self._sizes[-1])
        taken_s = forward_s + self._key_s * keys_each * rows
        return int(rows[np.argmax(expected - self.rate(requests) * taken_s)])

    def observe_ways(self, requests: int, tokens: int, round_s: float, rests: bool) -> None:
        """A round took so long, the wait for its drafts included. rests: its drafter has a model that can rest.

        Rounds of different sizes are compared by what plain decoding would have taken.
        """
        brought, taken = tokens / requests, round_s / self._plain_s[self._place(requests)[0]]
        if rests:
            self.rest.observe(brought, taken)
        if self.ahead.second or self._around_s > _WORTH * round_s:
            self.ahead.observe(brought, taken)

    # Drafts.

    def observe_drafts(self, asked: int, requests: int, rows: int, tokens: int) -> None:
        """A round of so many requests, `asked` of which had been drafted for, verified so many rows for its tokens.

        What the drafts gained is the tokens beyond plain decoding's, less what the time of their rows is worth.
        """
        more_s = self.seconds(rows) - self.seconds(requests)
        gained = tokens - requests - self.rate(requests) * more_s
        self._gain += _NEW * (gained / asked - self._gain)

    def observe_wait(self, seconds: float) -> None:
        """A round waited so long for its drafts."""
        self._wait_s += _NEW * (min(seconds, self.patience_s()) - self._wait_s)

    def worth_waiting(self, requests: int, missing: int) -> bool:
        """Whether a round of so many requests should wait for the drafts of those that have none.

        Where that costs more than the drafts bring it should not, but then it is tried again some time.
        """
        worth = self._wait_s * self.rate(requests) <= missing * self._gain
        if not worth:
            self._wait_s *= _RETRIED
            self._gain += (1 - _RETRIED) * (_HOPED - self._gain)
        return worth

    def patience_s(self) -> float:
        """How long after a verdict a round waits for drafts: twice the usual time."""
        return 2 * self._wait_s + _LEAST_WAIT_S

    # Prompts.

    def chunk_rows(self, requests: int, most: int, keys: float = 0.0, past: int = 0) -> int:
        """Rows of prompts that may ride along with a round of so many requests, so that it is not held up for long.

        keys: positions that those who decode have behind them, all together; past: that the prompt has.
        """
        if requests == 0:
            return most
        rows, seen = max(requests, round(requests * self._rows)), keys * self._rows
        return max(1, self._fitting(_PAUSE * self.seconds(rows, seen), rows, seen, most, past))

    def rows_while_waiting(self, waited_s: float, most: int, past: int = 0) -> int:
        """Rows of prompts that can be read while all wait for drafts, and have waited so long already: none where the
        drafts will be there before.
        """
        return self._fitting(self._wait_s - waited_s, 0, 0.0, most, past)

    def _fitting(self, seconds: float, rows: int, keys: float, most: int, past: int) -> int:
        """The largest chunk, up to `most` rows behind `past` positions, that a forward over other rows takes along."""

        def taken_s(chunk: int) -> float:
            return self.seconds(rows + chunk, keys + chunk * (past + chunk / 2))

        return bisect_right(range(1, most + 1), seconds, key=taken_s)


def _rising(seconds: Sequence[float]) -> list[float]:
    """No number larger than one behind it."""
    return [*accumulate(reversed(seconds), min)][::-1]
