"""The cost model: the one place that decides whether work is worth its time.

A forward over `rows` rows takes t(rows, keys) seconds, measured at start-up and updated by every forward. A round of R
requests emits R * g tokens and takes the forward plus some time around it, so a second is worth rate(R) tokens. Work is
done if it yields more expected tokens than it costs at this rate. Probabilities stay with their sources: the model only
receives expected numbers of tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.verifier.bandit import Bandit
from engine.wire.messages import Rates

SIZES = (1, 4, 8, 16, 32, 48, 64, 128, 256)
"""Row counts at which a forward's time is known."""
_NEW = 0.1  # weight of the latest measurement
_CLIP = 0.25  # clip of one sample's relative error: an interrupted forward must not make a size expensive for good
_ELSEWHERE = 0.03  # weight for the other sizes: what slows one forward slows them all
_PASSES, _REPEATED = 3, 64  # start-up: passes over the sizes up to this
_STEEP = 6.0  # start-up stops at the first size that takes this many times as long as the fastest
_SLOW_S = 0.5  # a size that takes longer is measured once or twice
_LONG = 1024  # past positions at which the time of a key is measured
_LEAST_LONG = 64  # fewer tell nothing
_TRIED = 0.01  # share of the emitted tokens that waiting for drafts may lose, where it does not pay, to try it again
_HOPED = 0.5  # tokens that drafting for a request is assumed to gain before any was observed
_LEAST_WAIT_S = 0.002
_CLEARLY = 0.97  # drafting ahead must take less than this share of the sequential time per token
_WORTH = 0.2  # share of a round outside the forward, below which drafting ahead is not worth a trial
_LONGEST_S = 5.0  # forward of a prompt while no request decodes
_MORE = 8  # rows of a request over which the cost of one more is averaged
_PAUSE = 2.0  # a round with a prompt chunk may take this many times as long as one without


class Attended(NamedTuple):
    """How many keys a forward attends to. read: of all requests, each once for all of its request's rows; seen: by all
    rows together.
    """

    read: float
    seen: float


NOTHING = Attended(0.0, 0.0)


class CostModel:
    """t(rows, keys) and the rates that follow from it.

    seconds: time of a forward by row count, without keys. read_s, seen_s: time of a key for its request, and for each
    row that sees it. forward_sizes: a forward computes one of so many rows, the first that holds all, and more run in
    slices of the last, so the time is a staircase. ahead: choice between drafting while rounds run, which takes cores
    from them, and drafting in turns. rest: choice whether a draft model rests while retrieval or plain
    decoding continues without it.
    """

    def __init__(
        self,
        seconds: dict[int, float],
        read_s: float = 0.0,
        seen_s: float = 0.0,
        mode: str = "sequential",
        forward_sizes: Sequence[int] = (1,),
    ):
        self._steps = (0, *forward_sizes)
        least_s: dict[int, float] = {}  # by the rows that are computed
        for size, taken_s in seconds.items():
            least_s[self._filled(size)] = min(taken_s, least_s.get(self._filled(size), taken_s))
        self._sizes = sorted(least_s)
        self._seconds, self._read_s, self._seen_s = [least_s[size] for size in self._sizes], read_s, seen_s
        self._least = _rising(self._seconds)
        self._plain_s = self._seconds  # as first measured: a fixed baseline for comparisons
        self.ahead = Bandit(16, 24, _CLEARLY, second=mode == "async", settled=mode != "auto")
        self.rest = Bandit(4)
        self._tokens = 1.0  # per request and round
        self._rows = 1.0  # per request and round
        self._past = 0.0  # positions before a request's rows
        self._around_s = 0.0  # time of a round outside the forward
        self._gain = _HOPED  # tokens that drafting for a request gains, less the cost of its rows
        self._wait_s = 0.0  # time that a round waits for its drafts
        self._spare = 0.0  # tokens that the next trial of waiting may lose

    @classmethod
    def measure(
        cls,
        forward_s: Callable[[int, int], float],
        largest: int,
        mode: str = "sequential",
        longest: int = _LONG,
        forward_sizes: Sequence[int] = (1,),
    ) -> CostModel:
        """forward_s: called with rows and past positions, runs such a forward and returns its time. longest: the most
        past positions that it can run behind. forward_sizes: as the class has it.
        """
        seconds: dict[int, float] = {}
        for size in [size for size in sorted({*SIZES, *forward_sizes}) if size < largest] + [largest]:
            seconds[size] = forward_s(size, 0)  # includes the one-time setup of a size's first forward
            if seconds[size] > _STEEP * min(seconds.values()):
                seconds[size] = min(seconds[size], forward_s(size, 0))
                if seconds[size] > _STEEP * min(seconds.values()):
                    break
        # round-robin, so that other load (the drafter is loading) does not fall on a single size
        quick = [size for size, taken in seconds.items() if size <= _REPEATED and taken <= _SLOW_S]
        for _ in range(_PASSES):
            for size in quick:
                seconds[size] = min(seconds[size], forward_s(size, 0))
        if (long := min(longest, _LONG)) < _LEAST_LONG:
            return cls(seconds, mode=mode, forward_sizes=forward_sizes)
        few, many = min(seconds), max((size for size in quick if size <= 32), default=min(seconds))
        return cls(seconds, *_key_seconds(forward_s, few, many, long, _PASSES if quick else 1), mode, forward_sizes)

    # The forward. Called several times a round on few numbers: plain Python, since numpy takes ten times as long.

    def seconds(self, rows: int, keys: Attended = NOTHING) -> float:
        """t(rows, keys). Linear between two sizes, proportional beyond the largest. Larger sizes cost no less than
        smaller ones.
        """
        rows = self._filled(rows)
        above, near = self._place(rows)
        below_s, above_s = self._least[max(0, above - 1)], self._least[above]
        keys_s = self._read_s * keys.read + self._seen_s * keys.seen
        return (below_s + near * (above_s - below_s)) * max(1.0, rows / self._sizes[-1]) + keys_s

    def observe_forward(self, rows: int, keys: Attended, seconds: float) -> None:
        """Learn from a forward that took `seconds`."""
        error = max(-_CLIP, min(_CLIP, seconds / self.seconds(rows, keys) - 1))
        above, near = self._place(rows)
        weights = [_ELSEWHERE] * len(self._sizes)
        weights[above] += (_NEW - _ELSEWHERE) * near
        weights[max(0, above - 1)] += (_NEW - _ELSEWHERE) * (1 - near)
        self._seconds = [size_s * (1 + weight * error) for size_s, weight in zip(self._seconds, weights, strict=True)]
        self._least = _rising(self._seconds)

    def _place(self, rows: int) -> tuple[int, float]:
        """The index of the next larger size, or the largest, and how far `rows` is on the way to it, 0 to 1."""
        rows = self._filled(rows)
        above = min(bisect_left(self._sizes, rows), len(self._sizes) - 1)
        if not above or rows >= self._sizes[above]:
            return above, 1.0
        below = self._sizes[above - 1]
        return above, (rows - below) / (self._sizes[above] - below)

    def _filled(self, rows: int) -> int:
        """The rows that a forward over `rows` rows computes."""
        whole, rest = divmod(rows, self._steps[-1])
        return whole * self._steps[-1] + self._steps[bisect_left(self._steps, rest)]

    # Rounds.

    def observe_round(self, requests: int, rows: int, tokens: int, around_s: float, past: int = 0) -> None:
        """A round verified the trees of `requests` requests, `rows` nodes in total, and emitted `tokens` tokens.

        around_s: from the previous round's end to this one's, less the forward. past: positions before the trees, of
        all requests together.
        """
        self._tokens += _NEW * (tokens / requests - self._tokens)
        self._rows += _NEW * (rows / requests - self._rows)
        self._past += _NEW * (past / requests - self._past)
        self._around_s += _NEW * (around_s - self._around_s)

    def rate(self, requests: int) -> float:
        """Tokens per second that a round of `requests` requests yields at present."""
        forward_s = self._usual_s(requests, self._usual_rows(requests))
        return requests * self._tokens / (forward_s + max(0.0, self._around_s))

    def _usual_rows(self, requests: int) -> int:
        """Rows that the trees of `requests` requests usually have together."""
        return max(requests, round(requests * self._rows))

    def _usual_s(self, requests: int, rows: int) -> float:
        """The forward of a round of `requests` requests with `rows` rows in all, behind texts of the usual length."""
        return self.seconds(rows, Attended(requests * self._past, rows * self._past))

    def rates(self, requests: int, alone: bool) -> Rates:
        """The rates sent to the drafter. alone: the next round verifies the root alone."""
        rows = requests if alone else self._usual_rows(requests)
        around_s = 0.0 if alone else max(0.0, self._around_s)
        rate = self.rate(requests)
        return Rates(self._usual_s(requests, rows) + around_s, self._tokens, 1 / rate, rate * self._row_s(requests))

    def _row_s(self, requests: int) -> float:
        """What one more row costs in a forward of a usual round: the mean over a few more for each request."""
        rows, more = self._usual_rows(requests), _MORE * requests
        return (self._usual_s(requests, rows + more) - self._usual_s(requests, rows)) / more

    def nodes_worth(self, worth: NDArray[np.float32], requests: int, keys_each: float = 0.0) -> int:
        """How many of the nodes to verify. worth: [nodes] expected tokens of each, in descending order; the first
        `requests` are the trees' roots, which are always verified. keys_each: average number of keys that a row sees.
        """
        rows = np.arange(requests, len(worth) + 1)
        expected = np.cumsum(worth, dtype=np.float64)[requests - 1 :]
        whole, rest = np.divmod(rows, self._steps[-1])
        filled = whole * self._steps[-1] + np.array(self._steps)[np.searchsorted(self._steps, rest)]
        forward_s = np.interp(filled, self._sizes, self._least) * np.maximum(1.0, filled / self._sizes[-1])
        taken_s = forward_s + self._seen_s * keys_each * rows
        return int(rows[np.argmax(expected - self.rate(requests) * taken_s)])

    def observe_ways(self, requests: int, tokens: int, round_s: float, rests: bool) -> None:
        """A round took `round_s`, including the wait for its drafts. rests: its drafter has a model that can rest.

        Times are relative to plain decoding's, so that rounds of different sizes can be compared.
        """
        brought, taken = tokens / requests, round_s / self._plain_s[self._place(requests)[0]]
        if rests:
            self.rest.observe(brought, taken)
        if self.ahead.second or self._around_s > _WORTH * round_s:
            self.ahead.observe(brought, taken)

    # Drafts.

    def observe_drafts(self, asked: int, requests: int, rows: int, tokens: int) -> None:
        """A round of `requests` requests, `asked` of which were drafted for, verified `rows` rows and emitted `tokens`.

        The drafts' gain is the tokens beyond plain decoding's, less what the time of their rows is worth.
        """
        more_s = self._usual_s(requests, rows) - self._usual_s(requests, requests)
        gained = tokens - requests - self.rate(requests) * more_s
        self._gain += _NEW * (gained / asked - self._gain)

    def observe_wait(self, seconds: float) -> None:
        """A round waited `seconds` for its drafts."""
        self._wait_s += _NEW * (min(seconds, self.patience_s()) - self._wait_s)

    def worth_waiting(self, requests: int, missing: int) -> bool:
        """Whether a round of `requests` requests should wait for the drafts of the `missing` ones.

        It should not if waiting costs more than the drafts gain. But texts change, so it is tried again as soon as what
        a trial is thought to lose is a small share of what rounds have emitted since the last.
        """
        lost = self._wait_s * self.rate(requests) - missing * self._gain
        self._spare += _TRIED * requests * self._tokens
        if lost > self._spare:
            return False
        self._spare = 0.0
        return True

    def patience_s(self) -> float:
        """How long after a verdict a round waits for drafts: twice the usual time."""
        return 2 * self._wait_s + _LEAST_WAIT_S

    # Prompts.

    def chunk_rows(self, requests: int, most: int, read: float = 0.0, past: int = 0) -> int:
        """Prompt rows that may join a round of `requests` decoding requests without delaying it for long: but for at
        least as long as their own past keys take to read, or far into a prompt little else would be done.

        read: past positions of all decoding requests together; past: of the prompt.
        """
        if requests == 0:  # workers answer between forwards only, and one that is silent for long is replaced
            return max(1, self._fitting(_LONGEST_S, 0, NOTHING, most, past))
        rows, keys = self._usual_rows(requests), Attended(read, read * self._rows)
        round_s = self.seconds(rows, keys)
        more_s = max((_PAUSE - 1) * round_s, 2 * self._read_s * past)
        return max(1, self._fitting(round_s + more_s, rows, keys, most, past))

    def rows_while_waiting(self, waited_s: float, most: int, past: int = 0) -> int:
        """Prompt rows that can be read while all requests wait for drafts and have waited `waited_s`: none if the
        drafts will arrive first.
        """
        return self._fitting(self._wait_s - waited_s, 0, NOTHING, most, past)

    def _fitting(self, seconds: float, rows: int, keys: Attended, most: int, past: int) -> int:
        """The largest chunk, up to `most` rows after `past` positions, that with `rows` other rows takes `seconds`."""

        def taken_s(chunk: int) -> float:
            return self.seconds(rows + chunk, Attended(keys.read + past, keys.seen + chunk * (past + chunk / 2)))

        return bisect_right(range(1, most + 1), seconds, key=taken_s)


def _key_seconds(
    forward_s: Callable[[int, int], float], few: int, many: int, long: int, passes: int
) -> tuple[float, float]:
    """The time of a key for its request, and for each row that sees it, by forwards of `few` and of `many` rows behind
    no text and behind `long` positions.
    """
    kinds = [(rows, past) for rows in sorted({few, many}) for past in (0, long)]
    taken_s = [[forward_s(*kind) for kind in kinds] for _ in range(passes)]
    least_s = dict(zip(kinds, map(min, zip(*taken_s, strict=True)), strict=True))
    few_s, many_s = (max(0.0, least_s[rows, long] - least_s[rows, 0]) for rows in (few, many))
    # from one row count alone, every row is thought to cost as much: the cautious guess
    seen_s = max(0.0, many_s - few_s) / (many - few) if many > few else few_s / few
    return max(0.0, few_s - few * seen_s) / long, seen_s / long


def _rising(seconds: Sequence[float]) -> list[float]:
    """The numbers, each lowered to the smallest that follows it, so that they never decrease."""
    return [*accumulate(reversed(seconds), min)][::-1]
