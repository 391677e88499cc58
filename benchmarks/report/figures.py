"""From rows to figures: speed-ups with their intervals, and which answers loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, TypeVar

import msgspec
import numpy as np

from engine.core.errors import ConfigError

from .cells import Cells, Where, resampled

BASELINE = "none"
PEERS = ("hf", "hf-pld", "hf-assisted")
"""`transformers` itself: plain generate, prompt lookup, and assisted generation with the SPS model."""
ROWS = "results.jsonl"
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
    rounding. token_ms: between tokens; those that come together share their wait. forward_ms: of the target, by
    number of nodes, median. peak_memory_mb: of the contestant's processes so far. exact: any difference from plain
    decoding is an error; inexact: why it is not, if known. activations: how products took their rows, if
    known. difference: the first.
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
    forward_ms: dict[str, float] = {}
    exact: bool = False
    inexact: str = ""
    activations: str | None = None
    difference: Difference | None = None
    turn: int = 1
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Summary(msgspec.Struct, frozen=True):
    """A contestant over some answers. speed_up: the median of per-prompt ratios of tokens/s to plain decoding's; over
    several suites the geometric mean of their medians, so that each counts the same however often it was asked. low,
    high: its 95% interval by bootstrap over prompts. The others: means of the suites' means, tokens accepted
    over all rounds of a suite; memory: the most.
    """

    method: str
    answers: int
    tokens_per_second: float
    speed_up: float
    low: float
    high: float
    mean_accepted_tokens: float | None
    time_to_first_token_s: float | None
    verifier_busy: float | None
    draft_hit_rate: float | None
    round_ms_p50: float | None
    round_ms_p95: float | None
    verify_ms: float | None
    draft_ms: float | None
    nodes: float | None
    token_ms_p50: float | None
    token_ms_p95: float | None
    other_ms: float | None
    depth: float | None
    peak_memory_mb: float | None
    equal: int
    ties: int
    compared: int

    @property
    def same_text(self) -> str:
        """How many texts equal plain decoding's, of those that can be compared; ties apart."""
        if not self.compared:
            return "-"
        return f"{self.equal}/{self.compared}" + (f", {self.ties} tied" if self.ties else "")


Line = TypeVar("Line", bound=msgspec.Struct)


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """The rows of a file that a benchmark wrote; none where there is no file."""
    try:
        with path.open(encoding="utf8") as lines:
            return [msgspec.json.decode(line, type=kind) for line in lines]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"results={path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"results={path}: is not of this version's talon bench ({error}): run it again") from None


def loops(tokens: Sequence[int]) -> bool:
    """Whether some 8 tokens in a row occur more than 4 times."""
    grams = Counter(tuple(tokens[i : i + _LOOP_LENGTH]) for i in range(len(tokens) - _LOOP_LENGTH + 1))
    return max(grams.values(), default=0) > _LOOP_COUNT


def tokens_a_round(rows: Iterable[Row]) -> float | None:
    """Mean tokens of all these answers' rounds; None if none of them was made of rounds."""
    told = [(int(tokens), rounds) for row in rows for tokens, rounds in row.accepted.items()]
    return sum(tokens * rounds for tokens, rounds in told) / sum(rounds for _, rounds in told) if told else None


def speed_ups(rows: Iterable[Row], method: str) -> list[float]:
    """Per prompt, the method's tokens/s over plain decoding's in the same repeat."""
    rows = list(rows)
    plain = {_prompt(row): row.tokens_per_second for row in rows if row.method == BASELINE}
    return [row.tokens_per_second / plain[_prompt(row)] for row in rows if row.method == method]


def cells(rows: Sequence[Row]) -> Cells:
    """The speed-ups by temperature, suite and contestant."""
    found: dict[Where, dict[Any, float]] = {}
    plain = {_prompt(row): row.tokens_per_second for row in rows if row.method == BASELINE}
    for row in rows:
        if row.method != BASELINE:
            cell = found.setdefault((f"T = {row.temperature:g}", row.suite, row.method), {})
            cell[row.question_id, row.repeat] = row.tokens_per_second / plain[_prompt(row)]
    return found


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One line per contestant, in the order of the rows' first mention, plain decoding first."""
    names = sorted({row.method for row in rows}, key=lambda name: (name != BASELINE, _first(rows, name)))
    return [_summary(rows, name) for name in names]


def first_turns(rows: Sequence[Row]) -> list[Row]:
    """Without the later turns of conversations, which repeat what was said."""
    return [row for row in rows if row.turn == 1]


def without_loops(rows: Sequence[Row]) -> list[Row]:
    """The prompts on which plain decoding does not loop: a loop flatters methods that copy from the text."""
    looping = {_prompt(row) for row in rows if row.method == BASELINE and row.loops}
    return [row for row in rows if _prompt(row) not in looping]


def _summary(rows: Sequence[Row], method: str) -> Summary:
    suites: dict[str, list[Row]] = {}
    for row in rows:
        suites.setdefault(row.suite, []).append(row)
    asked = {suite: mine for suite, some in suites.items() if (mine := [row for row in some if row.method == method])}
    mine = [row for some in asked.values() for row in some]
    ratios = [speed_ups(suites[suite], method) for suite in asked]
    samples = np.exp(np.mean([np.log(resampled(some, seed)) for seed, some in enumerate(ratios)], axis=0))
    low, high = np.quantile(samples, [0.025, 0.975])
    compared = [row.output_equal for row in mine if row.output_equal is not None]
    memory = [row.peak_memory_mb for row in mine if row.peak_memory_mb is not None]
    pooled = [tokens for some in asked.values() if (tokens := tokens_a_round(some)) is not None]

    def average(name: str) -> float | None:
        values = [[v for row in some if (v := getattr(row, name)) is not None] for some in asked.values()]
        return mean(map(mean, told)) if (told := [some for some in values if some]) else None

    return Summary(
        method=method,
        answers=len(mine),
        tokens_per_second=average("tokens_per_second") or 0.0,
        speed_up=geometric_mean(map(median, ratios)),
        low=float(low),
        high=float(high),
        mean_accepted_tokens=mean(pooled) if pooled else None,
        time_to_first_token_s=average("time_to_first_token_s"),
        verifier_busy=average("verifier_busy"),
        draft_hit_rate=average("draft_hit_rate"),
        round_ms_p50=average("round_ms_p50"),
        round_ms_p95=average("round_ms_p95"),
        verify_ms=average("verify_ms"),
        draft_ms=average("draft_ms"),
        nodes=average("nodes"),
        token_ms_p50=average("token_ms_p50"),
        token_ms_p95=average("token_ms_p95"),
        other_ms=average("other_ms"),
        depth=average("depth"),
        peak_memory_mb=max(memory) if memory else None,
        equal=sum(compared),
        ties=sum(row.tie for row in mine),
        compared=len(compared),
    )


def _prompt(row: Row) -> tuple[str, str, float, int]:
    return row.suite, row.question_id, row.temperature, row.repeat


def _first(rows: Sequence[Row], method: str) -> int:
    return next(i for i, row in enumerate(rows) if row.method == method)
