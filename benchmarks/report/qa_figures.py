"""Makes the tables of `talon qa` from its rows: the speed-up of speculation, and how right the answers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np

from .figures import PLAIN
from .ratios import Ratios, Where, interval
from .tables import Table, known

ROWS = "qa.jsonl"
_RESAMPLES = 2000


class Scores(msgspec.Struct, frozen=True):
    """How right an answer is. exact: it is an accepted answer. f1: over words. subspan: it contains an accepted answer,
    as *Lost in the Middle* scores answers in sentences.
    """

    exact: float
    f1: float
    subspan: float


class QaRow(msgspec.Struct, frozen=True):
    """One answer, a line of qa.jsonl. scores: None where no accepted answer is known. quoted: share of its runs of four
    words that occur in the passages most similar to the question. tie: the text differs, but only by rounding.
    """

    setting: str
    kind: str
    question_id: str
    method: str
    tokens: int
    seconds: float
    rounds: int | None
    scores: Scores | None
    quoted: float | None
    output_equal: bool
    tie: bool
    difference: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Retrieval(msgspec.Struct):
    """recall_at_1, recall_at_count: of the questions with passages of their own, the share that found one of these."""

    passages: int
    questions: int
    count: int
    recall_at_1: float
    recall_at_count: float

    def __str__(self) -> str:
        return (
            f"{self.passages} passages; of {self.questions} questions with some of their own {self.recall_at_1:.0%} "
            f"found one first, {self.recall_at_count:.0%} among {self.count}"
        )


def ratios(rows: Sequence[QaRow]) -> Ratios:
    """Return the speed-ups by setting, kind and method."""
    plain = {(row.setting, row.kind, row.question_id): row for row in rows if row.method == PLAIN}
    found: dict[Where, dict[Any, float]] = {}
    for row in rows:
        if row.method != PLAIN:
            some = found.setdefault((row.setting, row.kind, row.method), {})
            some[row.question_id] = (
                row.tokens_per_second / plain[row.setting, row.kind, row.question_id].tokens_per_second
            )
    return found


def speed_table(rows: Sequence[QaRow]) -> Table:
    """Make a line for each setting, kind of question and method."""
    over, lines = ratios(rows), []
    for setting, kind, method in dict.fromkeys((row.setting, row.kind, row.method) for row in rows):
        mine = [row for row in rows if (row.setting, row.kind, row.method) == (setting, kind, method)]
        speed_ups = [*over.get((setting, kind, method), {0: 1.0}).values()]
        rounds = sum(row.rounds or 0 for row in mine)
        low, high = interval(speed_ups)
        ties = sum(row.tie for row in mine)
        lines.append(
            [
                setting,
                kind,
                method,
                f"{sum(row.tokens for row in mine) / sum(row.seconds for row in mine):.0f}",
                f"{median(speed_ups):.2f}x",
                f"{low:.2f}-{high:.2f}",
                f"{sum(row.tokens - 1 for row in mine) / rounds:.2f}" if rounds else "-",
                f"{sum(row.output_equal for row in mine)}/{len(mine)}" + (f", {ties} tied" if ties else ""),
            ]
        )
    columns = ("setting", "set", "method", "tokens/s", "speed-up", "95%", "MAT", "same text")
    return Table("Knowledge-heavy questions: speed", columns, lines, words=3)


def score_table(rows: Sequence[QaRow]) -> Table:
    """Make the table of plain decoding's scores, and how many methods have the same."""
    lines = []
    for setting, kind in dict.fromkeys((row.setting, row.kind) for row in rows):
        some = [row for row in rows if (row.setting, row.kind) == (setting, kind)]
        plain = {row.question_id: row for row in some if row.method == PLAIN}
        others = {row.method for row in some} - {PLAIN}
        equal = others - {row.method for row in some if row.scores != plain[row.question_id].scores}
        scored = [row.scores for row in plain.values() if row.scores is not None]
        lines.append(
            [
                setting,
                kind,
                str(len(plain)),
                *(_share(scored, take) for take in (lambda s: s.f1, lambda s: s.subspan)),
                known(
                    mean(shares) if (shares := [r.quoted for r in plain.values() if r.quoted is not None]) else None,
                    ".2f",
                ),
                f"{len(equal)} of {len(others)}",
            ]
        )
    columns = ("setting", "set", "answers", "F1", "subspan", "quoted", "same scores")
    return Table("Knowledge-heavy questions: scores of plain decoding", columns, lines, words=2)


def _share(scores: Sequence[Scores], take: Callable[[Scores], float]) -> str:
    """Return the mean and its 95% interval, by bootstrap."""
    if not scores:
        return "-"
    values = np.array([take(one) for one in scores])
    means = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():.2f} ({low:.2f}-{high:.2f})"
