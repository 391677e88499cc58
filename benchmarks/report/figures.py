"""Makes figures and tables from the rows of one request at a time: speed-ups with their intervals, and
looping answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import geometric_mean, mean, median
from typing import Any

import msgspec
import numpy as np

from .ratios import Ratios, Where, resampled
from .tables import Table, known

PLAIN = "none"
TRANSFORMERS = ("hf", "hf-pld", "hf-assisted")
"""`transformers` itself: plain generate, prompt lookup, and assisted generation with the SPS model."""
ROWS = "results.jsonl"
Asked = tuple[str, str, float]
"""Suite, question and temperature."""
_LOOP_LENGTH, _LOOP_COUNT = 8, 4


class Difference(msgspec.Struct, frozen=True):
    """Where a text first differs from another. token, expected: None where that text has ended."""

    at: int
    token: int | None
    expected: int | None

    @classmethod
    def between(cls, text: Sequence[int], expected: Sequence[int]) -> Difference | None:
        pairs = enumerate(zip_longest(text, expected))
        return next((cls(at, one, other) for at, (one, other) in pairs if one != other), None)

    def __str__(self) -> str:
        token, expected = ("the end" if t is None else str(t) for t in (self.token, self.expected))
        return f"token {self.at} is {token} instead of {expected}"


class Row(msgspec.Struct, frozen=True):
    """One answer, a line of results.jsonl. None: unknown for this contestant.

    turn: of its conversation; later turns are a suite of their own. cached_tokens: tokens of the prompt already in the
    cache. seconds: from the call to the last token. round_ms: between verdicts. verify_ms, draft_ms: in the models'
    forwards, mean per round; other_ms: of a round outside them. nodes, depth: of the tree verified, mean per round.
    accepted: tokens emitted -> number of such rounds. tie: the text differs from plain decoding's, but only by
    rounding. token_ms: between tokens; those that come together share their wait. peak_memory_mb: of the contestant's
    processes so far. exact: any difference from plain decoding is an error; inexact: why it is not, if known.
    activations: how products took their rows, weights: the type of most matrices, if known. difference: the first.
    """

    suite: str
    question_id: str
    method: str
    temperature: float
    repeat: int
    tokens: int
    seconds: float
    rounds: int | None
    mean_accepted_tokens: float | None
    time_to_first_token_s: float | None
    verifier_busy: float | None
    draft_hit_rate: float | None
    output_equal: bool | None
    loops: bool
    round_ms_p50: float | None
    round_ms_p95: float | None
    verify_ms: float | None
    draft_ms: float | None
    nodes: float | None
    accepted: dict[str, int]
    tie: bool = False
    token_ms_p50: float | None = None
    token_ms_p95: float | None = None
    other_ms: float | None = None
    depth: float | None = None
    peak_memory_mb: float | None = None
    exact: bool = False
    inexact: str = ""
    activations: str | None = None
    weights: str | None = None
    difference: Difference | None = None
    turn: int = 1
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def decoded_per_second(self) -> float | None:
        """Tokens a second from the first one on; None if that is unknown, or nothing follows it."""
        if self.time_to_first_token_s is None or self.tokens < 2:
            return None
        return (self.tokens - 1) / (self.seconds - self.time_to_first_token_s)

    @property
    def prompt(self) -> tuple[str, str, float, int]:
        """The key that plain decoding's row of the same prompt and repeat has too."""
        return *self.asked, self.repeat

    @property
    def asked(self) -> Asked:
        """The key that all repeats of the prompt have; a later turn has a suite of its own."""
        return self.suite, self.question_id, self.temperature


class Summary:
    """A contestant over some answers. speed_up: the median of per-prompt ratios of tokens/s to plain decoding's; over
    several suites the geometric mean of their medians, so that each counts the same however often it was asked. low,
    high: its 95% interval by bootstrap over prompts. decoding: the same of tokens/s from the first token on; None if
    that is unknown.
    """

    def __init__(self, method: str, rows: Sequence[Row]):
        """Summarise a method. rows: of all contestants."""
        self.method = method
        asked = dict.fromkeys(row.suite for row in rows if row.method == method)
        self.suites = [[row for row in rows if (row.suite, row.method) == (suite, method)] for suite in asked]
        beside = [[row for row in rows if row.suite == suite] for suite in asked]
        ratios = [speed_ups(some, method) for some in beside]
        samples = np.exp(np.mean([np.log(resampled(some, seed)) for seed, some in enumerate(ratios)], axis=0))
        self.speed_up = geometric_mean(map(median, ratios))
        decoded = [speed_ups(some, method, "decoded_per_second") for some in beside]
        self.decoding = geometric_mean(map(median, found)) if (found := [some for some in decoded if some]) else None
        self.low, self.high = map(float, np.quantile(samples, [0.025, 0.975]))

    def mean(self, name: str) -> float | None:
        """Return the mean of the suites' means of a field; None if it is unknown."""
        values = [[v for row in some if (v := getattr(row, name)) is not None] for some in self.suites]
        return mean(map(mean, found)) if (found := [some for some in values if some]) else None

    @property
    def mean_accepted_tokens(self) -> float | None:
        """The mean of the suites' tokens over all of their rounds."""
        pooled = [tokens for some in self.suites if (tokens := tokens_a_round(some)) is not None]
        return mean(pooled) if pooled else None

    @property
    def peak_memory_mb(self) -> float | None:
        return max((row.peak_memory_mb for some in self.suites for row in some if row.peak_memory_mb), default=None)

    @property
    def same_text(self) -> str:
        """The number of texts that equal plain decoding's, of those that can be compared; ties apart."""
        rows = [row for some in self.suites for row in some]
        compared = [row.output_equal for row in rows if row.output_equal is not None]
        ties = sum(row.tie for row in rows)
        return f"{sum(compared)}/{len(compared)}" + (f", {ties} tied" if ties else "") if compared else "-"


def loops(tokens: Sequence[int]) -> bool:
    """Return whether some 8 tokens in a row occur more than 4 times."""
    grams = Counter(tuple(tokens[i : i + _LOOP_LENGTH]) for i in range(len(tokens) - _LOOP_LENGTH + 1))
    return max(grams.values(), default=0) > _LOOP_COUNT


def tokens_a_round(rows: Iterable[Row]) -> float | None:
    """Return the mean tokens of all these answers' rounds; None if none of them was made of rounds."""
    found = [(int(tokens), rounds) for row in rows for tokens, rounds in row.accepted.items()]
    return sum(tokens * rounds for tokens, rounds in found) / sum(rounds for _, rounds in found) if found else None


def speed_ups(rows: Iterable[Row], method: str, rate: str = "tokens_per_second") -> list[float]:
    """Return, per prompt, the method's tokens/s over plain decoding's. rate: the rows' property that is compared, for
    prompts of which it is known.
    """
    return [*_by_prompt(rows, method, rate).values()]


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return the speed-ups by temperature, suite and contestant."""
    found: dict[Where, dict[Any, float]] = {}
    for method in dict.fromkeys(row.method for row in rows if row.method != PLAIN):
        for (suite, question, temperature), ratio in _by_prompt(rows, method).items():
            found.setdefault((f"T = {temperature:g}", suite, method), {})[question] = ratio
    return found


def _by_prompt(rows: Iterable[Row], method: str, rate: str = "tokens_per_second") -> dict[Asked, float]:
    """Return for each prompt the median over repeats of the ratio to plain decoding in the same repeat: repeats of a
    prompt are no further prompts, so an interval over prompts counts them once.
    """
    rows = list(rows)
    plain = {row.prompt: getattr(row, rate) for row in rows if row.method == PLAIN}
    found: dict[Asked, list[float]] = {}
    for row in (row for row in rows if row.method == method):
        mine, own = getattr(row, rate), plain[row.prompt]
        if mine is not None and own is not None:
            found.setdefault(row.asked, []).append(mine / own)
    return {asked: median(some) for asked, some in found.items()}


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """Return a summary for each contestant, the fastest first."""
    found = [Summary(name, rows) for name in dict.fromkeys(row.method for row in rows)]
    return sorted(found, key=lambda one: -one.speed_up)


def first_turns(rows: Sequence[Row]) -> list[Row]:
    """Leave out the later turns of conversations, which repeat what was said."""
    return [row for row in rows if row.turn == 1]


def by_temperature(rows: Iterable[Row]) -> dict[float, list[Row]]:
    """Group the rows by temperature, ascending."""
    groups: dict[float, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.temperature):
        groups.setdefault(row.temperature, []).append(row)
    return groups


def without_loops(rows: Sequence[Row]) -> list[Row]:
    """Keep the prompts on which plain decoding does not loop: a loop flatters methods that copy from the text."""
    looping = {row.prompt for row in rows if row.method == PLAIN and row.loops}
    return [row for row in rows if row.prompt not in looping]


Column = Callable[[Summary], str]


def _mean(name: str, form: str, scale: float = 1.0) -> Column:
    return lambda one: known(one.mean(name), form, scale)


_SPEED: dict[str, Column] = {
    "method": lambda one: one.method,
    "tokens/s": _mean("tokens_per_second", ".1f"),
    "speed-up": lambda one: f"{one.speed_up:.2f}x",
    "95%": lambda one: f"{one.low:.2f}-{one.high:.2f}",
    "decoding": lambda one: "-" if one.decoding is None else f"{one.decoding:.2f}x",
    "MAT": lambda one: known(one.mean_accepted_tokens, ".2f"),
    "TTFT ms": _mean("time_to_first_token_s", ".0f", 1000),
    "busy": _mean("verifier_busy", ".0%"),
    "same text": lambda one: one.same_text,
}
_ROUNDS: dict[str, Column] = {
    "method": lambda one: one.method,
    "token ms": _mean("token_ms_p50", ".1f"),
    "p95": _mean("token_ms_p95", ".1f"),
    "round ms": _mean("round_ms_p50", ".1f"),
    "verify": _mean("verify_ms", ".1f"),
    "draft": _mean("draft_ms", ".1f"),
    "other": _mean("other_ms", ".1f"),
    "nodes": _mean("nodes", ".0f"),
    "depth": _mean("depth", ".1f"),
    "hits": _mean("draft_hit_rate", ".0%"),
    "peak MB": lambda one: known(one.peak_memory_mb, ".0f"),
}


def speed_table(rows: Sequence[Row]) -> Table:
    """Make a line for each contestant, the fastest first: what a user sees."""
    title = "All answers, loops included" if any(row.loops for row in rows) else "All answers"
    return _table(title, summaries(rows), _SPEED)


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Make a `speed_table` of the first turns for each temperature."""
    tables = {t: speed_table(first_turns(some)) for t, some in by_temperature(rows).items()}
    return [replace(table, title=f"{table.title}, T = {t:g}") for t, table in tables.items()]


def round_table(rows: Sequence[Row]) -> Table:
    """Make the table of what their rounds consist of."""
    return _table("Rounds", [one for one in summaries(rows) if one.mean("round_ms_p50") is not None], _ROUNDS)


def _table(title: str, lines: Sequence[Summary], columns: dict[str, Column]) -> Table:
    return Table(title, [*columns], [[cell(line) for cell in columns.values()] for line in lines])


def turn_table(rows: Sequence[Row]) -> Table:
    """Make a line for each turn of multi-turn conversations: tokens of the prompt, those already in the cache, tokens
    accepted.
    """
    later = {row.suite.partition(",")[0] for row in rows if row.turn > 1}
    lines = []
    for suite, method in dict.fromkeys((row.suite, row.method) for row in rows if row.suite.partition(",")[0] in later):
        of_suite = [row for row in rows if row.suite == suite]
        mine = [row for row in of_suite if row.method == method]
        cached = [row.cached_tokens for row in mine if row.cached_tokens is not None]
        first = [row.time_to_first_token_s for row in mine if row.time_to_first_token_s is not None]
        lines.append(
            [
                str(mine[0].turn),
                method,
                f"{mean(row.prompt_tokens for row in mine):.0f}",
                f"{mean(cached):.0f}" if cached else "-",
                f"{1000 * median(first):.0f}" if first else "-",
                f"{mean(row.tokens_per_second for row in mine):.0f}",
                f"{median(speed_ups(of_suite, method)):.2f}x",
                known(tokens_a_round(mine), ".2f"),
            ]
        )
    columns = ("turn", "method", "prompt", "cached", "TTFT ms", "tokens/s", "speed-up", "MAT")
    return Table("Turns of a conversation", columns, lines, words=2)
