"""The cost model: the one place that says what time is worth.

A forward over `rows` rows takes t(rows, keys) seconds. A round of R requests emits R * g tokens and takes the forward
plus some time around it, so a second is worth rate(R) tokens. Work is done if

    E[tokens gained] - seconds * rate > 0.

Probabilities stay with their sources: the model only receives expected numbers of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from engine.costs.bandit import TwoOptionTrial
from engine.costs.constants import AROUND_FORWARD, CLEARLY_BETTER, LATEST_ROUND, LEAST_PATIENCE_S, MARGINAL_ROWS
from engine.costs.forward_time import NOTHING, Attended, ForwardTime
from engine.wire.messages import Rates

_LONGEST_S = 5.0  # most seconds of a forward of a prompt while no request decodes
_PAUSE = 2.0  # a round with a prompt chunk may take this many times as long as one without


class CostModel:
    """The rates that follow from the time of forwards and of rounds.

    forward: t(rows, keys). tokens: that a round emits for a request; wait_s: how long it waits for its drafts.
    mode: drafting while rounds run, which takes cores from them (async), in turns (sequential), or by trial (auto).
    """

    def __init__(self, forward: ForwardTime, mode: str = "sequential"):
        self.forward = forward
        self._at_start = copy(forward)  # a fixed baseline for comparisons
        self._mode = TwoOptionTrial(16, 24, CLEARLY_BETTER, second=mode == "async", settled=mode != "auto")
        self.tokens = 1.0
        self._rows = 1.0  # per request and round
        self._past = 0.0  # positions before a request's rows
        self._around_s = 0.0  # time of a round outside the forward
        self.wait_s = 0.0

    @property
    def drafting_ahead(self) -> bool:
        """Whether drafts are made while rounds run, and not in turns."""
        return self._mode.second

    def observe_round(self, requests: int, rows: int, tokens: int, around_s: float, past: int = 0) -> None:
        """Learn that a round verified the trees of `requests` requests, `rows` nodes in total, and emitted `tokens`
        tokens.

        around_s: from the previous round's end to this one's, less the forward. past: positions before the trees, of
        all requests together.
        """
        self.tokens += LATEST_ROUND * (tokens / requests - self.tokens)
        self._rows += LATEST_ROUND * (rows / requests - self._rows)
        self._past += LATEST_ROUND * (past / requests - self._past)
        self._around_s += LATEST_ROUND * (around_s - self._around_s)

    def rate(self, requests: int) -> float:
        """Return the tokens per second that a round of `requests` requests yields at present."""
        forward_s = self._usual_s(requests, self._usual_rows(requests))
        return requests * self.tokens / (forward_s + max(0.0, self._around_s))

    def plain_rate(self, requests: int) -> float:
        """Return the tokens per second of plain decoding."""
        return requests / self._usual_s(requests, requests)

    def _usual_rows(self, requests: int) -> int:
        """Return the rows that the trees of `requests` requests usually have together."""
        return max(requests, round(requests * self._rows))

    def _usual_s(self, requests: int, rows: int) -> float:
        """Return the time of the forward of a round of `requests` requests with `rows` rows in all, after texts of the
        usual length.
        """
        return self.forward.seconds(rows, Attended(requests * self._past, rows * self._past))

    def rates(self, requests: int, alone: bool) -> Rates:
        """Return the rates sent to the drafter. alone: the next round verifies the root alone."""
        rows = requests if alone else self._usual_rows(requests)
        around_s = 0.0 if alone else max(0.0, self._around_s)
        rate = self.rate(requests)
        return Rates(self._usual_s(requests, rows) + around_s, self.tokens, 1 / rate, rate * self._row_s(requests))

    def _row_s(self, requests: int) -> float:
        """Return what one more row costs in a forward of a usual round: the mean over a few more for each request. For
        rows that cost nothing, rounding may give less than that.
        """
        rows, more = self._usual_rows(requests), MARGINAL_ROWS * requests
        return max(0.0, self._usual_s(requests, rows + more) - self._usual_s(requests, rows)) / more

    # Trees.

    def count_paying(self, expected_tokens: NDArray[np.float32], requests: int, keys_each: float = 0.0) -> int:
        """Return how many of the nodes to verify. expected_tokens: [nodes], in descending order; the first `requests`
        are the trees' roots, which are always verified. keys_each: average number of keys that a row sees.
        """
        rows = np.arange(requests, len(expected_tokens) + 1)
        expected = np.cumsum(expected_tokens, dtype=np.float64)[requests - 1 :]
        return int(rows[np.argmax(expected - self.rate(requests) * self.forward.seconds_of(rows, keys_each))])

    def paying_nodes(
        self, expected_tokens: Sequence[NDArray[np.float32]], keys_each: float = 0.0
    ) -> list[NDArray[np.int64]]:
        """Return each tree's nodes that pay, ascending: the root, and nodes with all of their ancestors, since expected
        tokens never grow along a path. expected_tokens: of each tree, [nodes]; keys_each: as above.
        """
        owner = np.repeat(np.arange(len(expected_tokens)), [len(tree) for tree in expected_tokens])
        node = np.concatenate([np.arange(len(tree)) for tree in expected_tokens])
        all_expected = np.concatenate([*expected_tokens])
        order = np.argsort(np.where(node == 0, -np.inf, -all_expected), kind="stable")
        best = order[: self.count_paying(all_expected[order], len(expected_tokens), keys_each)]
        return [np.sort(node[best[owner[best] == tree]]) for tree in range(len(expected_tokens))]

    # Drafts.

    def observe_wait(self, seconds: float) -> None:
        """Learn that a round waited `seconds` for its drafts."""
        self.wait_s += LATEST_ROUND * (min(seconds, self.patience_s()) - self.wait_s)

    def patience_s(self) -> float:
        """Return how long after a verdict a round waits for drafts: twice the usual time."""
        return 2 * self.wait_s + LEAST_PATIENCE_S

    def observe_mode(self, requests: int, tokens: int, round_s: float) -> None:
        """Learn that a round took `round_s`, including the wait for its drafts.

        Times are relative to plain decoding's, so that rounds of different sizes can be compared.
        """
        if self.drafting_ahead or self._around_s > AROUND_FORWARD * round_s:
            self._mode.observe(tokens / requests, round_s / self._at_start.seconds(requests))

    # Prompts.

    def chunk_rows(self, requests: int, most: int, read: float = 0.0, past: int = 0) -> int:
        """Return the prompt rows that may join a round of `requests` decoding requests without delaying it for long.
        They may at least take as long as reading their own past keys, or far into a prompt little else would be done.

        read: past positions of all decoding requests together; past: of the prompt.
        """
        if requests == 0:  # workers answer between forwards only, and one that is silent for long is replaced
            return max(1, self._fitting(_LONGEST_S, 0, NOTHING, most, past))
        rows, keys = self._usual_rows(requests), Attended(read, read * self._rows)
        round_s = self.forward.seconds(rows, keys)
        more_s = max((_PAUSE - 1) * round_s, 2 * self.forward.read_s * past)
        return max(1, self._fitting(round_s + more_s, rows, keys, most, past))

    def reading_s(self, count: int, past: int, most: int) -> float:
        """Return the time that reading `count` more tokens after `past` takes, in forwards of at most `most` rows."""
        chunks = ((begin, min(most, past + count - begin)) for begin in range(past, past + count, most))
        return sum(self.forward.seconds(rows, Attended(begin, rows * (begin + rows / 2))) for begin, rows in chunks)

    def rows_while_waiting(self, waited_s: float, most: int, past: int = 0) -> int:
        """Return the prompt rows that can be read while all requests wait for drafts and have waited `waited_s`: none
        if the drafts will arrive first.
        """
        return self._fitting(self.wait_s - waited_s, 0, NOTHING, most, past)

    def _fitting(self, seconds: float, rows: int, keys: Attended, most: int, past: int) -> int:
        """Return the largest chunk, up to `most` rows after `past` positions, that with `rows` other rows takes
        `seconds`.
        """

        def taken_s(chunk: int) -> float:
            keys_seen = keys.seen + chunk * (past + chunk / 2)
            return self.forward.seconds(rows + chunk, Attended(keys.read + past, keys_seen))

        return bisect_right(range(1, most + 1), seconds, key=taken_s)
