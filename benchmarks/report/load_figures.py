"""Makes the tables of `talon bench --concurrency` from its rows: throughput, latency, and texts that differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any

import msgspec

from .figures import PLAIN
from .ratios import Ratios, Where, interval
from .tables import Table, known, p50_p95

ROWS = "load.jsonl"

FIRST_S, TOKEN_S = 1.0, 0.1
"""An answer counts for goodput if its first token came within FIRST_S, and the others within TOKEN_S each."""


class LoadRow(msgspec.Struct, frozen=True):
    """One answer under load, a line of load.jsonl. Seconds count from the start of its measurement.

    concurrency: requests at once, None where they arrive at random; arrivals: in that case, their share of plain
    decoding's capacity, or their number a second at a server that was named. emitted: when tokens came, and how many.
    output_equal: the text is that of the same prompt alone. exact: any difference is an error. busy: share of its
    decoding time that the verifier spent in forwards.
    """

    suite: str
    question_id: str
    method: str
    concurrency: int | None
    arrivals: float | None
    repeat: int
    asked_s: float
    emitted: list[tuple[float, int]]
    output_equal: bool
    exact: bool
    busy: float | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.emitted)

    @property
    def ended_s(self) -> float:
        return self.emitted[-1][0]

    @property
    def first_token_s(self) -> float:
        return self.emitted[0][0] - self.asked_s

    @property
    def pauses_s(self) -> list[float]:
        """The seconds between emissions. Tokens that come together have one pause, the one that a reader of the stream
        sees.
        """
        times = [at for at, _ in self.emitted]
        return [now - before for before, now in itertools.pairwise(times)]

    @property
    def is_good(self) -> bool:
        """Whether it came fast enough for goodput."""
        return self.first_token_s <= FIRST_S and sum(self.pauses_s) <= TOKEN_S * max(1, self.tokens - 1)


def tokens_per_second(rows: Sequence[LoadRow]) -> float:
    """Return tokens a second over all requests, while all places are taken: until the first place is left empty."""
    last_asked_s = max(row.asked_s for row in rows)
    full_s = min(row.ended_s for row in rows if row.ended_s > last_asked_s)
    return sum(count for row in rows for at, count in row.emitted if at <= full_s) / full_s


def requests_per_second(rows: Sequence[LoadRow]) -> float:
    """Return `tokens_per_second` in answers of average length."""
    return tokens_per_second(rows) * len(rows) / sum(row.tokens for row in rows)


def throughput(rows: Sequence[LoadRow], good: bool = False) -> float:
    """Return tokens a second from the first arrival to the last token; good: only of answers that came fast enough."""
    span_s = max(row.ended_s for row in rows) - min(row.asked_s for row in rows)
    return sum(row.tokens for row in rows if row.is_good or not good) / span_s


def at_once(level: int) -> str:
    return f"{level} at once"


def ratios(rows: Iterable[LoadRow]) -> Ratios:
    """Return tokens a second over plain decoding's at the same level, by repeat."""
    speeds = _speeds(rows)
    found: dict[Where, dict[Any, float]] = {}
    for (level, method, repeat), speed in speeds.items():
        if method != PLAIN and (level, PLAIN, repeat) in speeds:
            some = found.setdefault(("concurrency", at_once(level), method), {})
            some[repeat] = speed / speeds[level, PLAIN, repeat]
    return found


def _runs(rows: Iterable[LoadRow]) -> dict[tuple[int, str, int], list[LoadRow]]:
    """Group the rows by level, method and repeat."""
    runs: dict[tuple[int, str, int], list[LoadRow]] = {}
    for row in rows:
        if row.concurrency is not None:
            runs.setdefault((row.concurrency, row.method, row.repeat), []).append(row)
    return runs


def _speeds(rows: Iterable[LoadRow]) -> dict[tuple[int, str, int], float]:
    return {run: tokens_per_second(some) for run, some in _runs(rows).items()}


class Level(msgspec.Struct, frozen=True):
    """A method at one level of concurrency. over_plain: median over repeats of tokens/s over plain decoding's at the
    same level, low and high: its 95% interval; over_one: over plain decoding of one request at a time, None where
    that was not measured. busy: mean share of the time that the verifier spent in forwards, None for other servers.
    """

    concurrency: int
    method: str
    tokens_per_second: float
    over_plain: float
    low: float
    high: float
    over_one: float | None
    busy: float | None
    first_s: list[float]
    pauses_s: list[float]
    equal: int
    answers: int


def levels(rows: Iterable[LoadRow]) -> list[Level]:
    """Return a line for each level and method, levels ascending, in the methods' order of first mention,
    plain first.
    """
    runs = _runs(rows)
    speeds = {run: tokens_per_second(some) for run, some in runs.items()}
    methods = sorted({method for _, method, _ in runs}, key=lambda method: (method != PLAIN, method))
    lines = []
    for level in sorted({level for level, _, _ in runs}):
        for method in methods:
            mine = [repeat for one, name, repeat in runs if (one, name) == (level, method)]
            if not (repeats := [repeat for repeat in mine if (level, PLAIN, repeat) in runs]):
                continue  # the run was interrupted
            answers = [row for repeat in repeats for row in runs[level, method, repeat]]
            over = [speeds[level, method, r] / speeds[level, PLAIN, r] for r in repeats]
            ones = [speeds[level, method, r] / speeds[1, PLAIN, r] for r in repeats if (1, PLAIN, r) in speeds]
            lines.append(
                Level(
                    level,
                    method,
                    median(speeds[level, method, repeat] for repeat in repeats),
                    median(over),
                    *interval(over),
                    median(ones) if ones else None,
                    mean(busy) if (busy := [row.busy for row in answers if row.busy is not None]) else None,
                    [row.first_token_s for row in answers],
                    [pause for row in answers for pause in row.pauses_s],
                    sum(row.output_equal for row in answers),
                    len(answers),
                )
            )
    return lines


def level_table(lines: Sequence[Level]) -> Table:
    """Make the table of p50/p95 of the time to the first token and of the pauses between emissions."""
    return Table(
        "Requests at once (n)",
        ("n", "method", "tok/s", "speed-up", "95%", "over 1", "busy", "first ms", "pause ms", "same"),
        [
            [
                str(line.concurrency),
                line.method,
                f"{line.tokens_per_second:.0f}",
                f"{line.over_plain:.2f}x",
                f"{line.low:.2f}-{line.high:.2f}",
                "-" if line.over_one is None else f"{line.over_one:.2f}x",
                known(line.busy, ".0%"),
                p50_p95(line.first_s, 1000),
                p50_p95(line.pauses_s, 1000),
                f"{line.equal}/{line.answers}",
            ]
            for line in lines
        ],
        words=2,
    )


def arrival_table(rows: Sequence[LoadRow]) -> Table:
    """Make the table of requests that arrive at random."""
    runs: dict[tuple[float, bool, str], dict[int, list[LoadRow]]] = {}
    for row in rows:
        if row.arrivals is not None:
            run = runs.setdefault((row.arrivals, row.method != PLAIN, row.method), {})
            run.setdefault(row.repeat, []).append(row)
    lines = []
    for (share, _, method), repeats in sorted(runs.items()):
        answers = [row for some in repeats.values() for row in some]
        lines.append(
            [
                f"{share:g}",
                method,
                f"{median(throughput(some) for some in repeats.values()):.0f}",
                f"{median(throughput(some, good=True) for some in repeats.values()):.0f}",
                p50_p95([row.first_token_s for row in answers], 1000),
                p50_p95([pause for row in answers for pause in row.pauses_s], 1000),
                p50_p95([row.ended_s - row.asked_s for row in answers], 1, ".1f"),
                f"{sum(row.output_equal for row in answers)}/{len(answers)}",
            ]
        )
    columns = ("load", "method", "tokens/s", "goodput", "first ms", "pause ms", "answer s", "same text")
    return Table("Arrivals at random", columns, lines, words=2)
