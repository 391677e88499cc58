"""Are the texts of a method those of plain decoding? The figures of `talon check`.

If the target is exact, every token that differs is an error; if it is not, `benchmarks.ties` tells rounding from
errors. Whether plain decoding itself is right is shown by `transformers`: greedy texts are compared with those of its
generate in float32, ties allowed, as a target in bfloat16 rounds where that one does not: a tie is a gap that
transformers in bfloat16 turns around on these texts too (`benchmarks.ties.most_turned`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .figures import Difference
from .tables import Table


class Setting(msgspec.Struct, frozen=True):
    """An engine that is compared. threads: the verifier's, None: as many as it takes by itself."""

    method: str
    mode: str
    transport: str
    threads: int | None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} threads"
        return f"{self.method}, {self.mode}, {self.transport}{threads}"


class Different(msgspec.Struct, frozen=True):
    """A text that differs. words: both tokens as text. gap: of the tokens' float32 scores, None if none is allowed."""

    suite: str
    question_id: str
    difference: Difference
    words: str
    gap: float | None


class Comparison(msgspec.Struct):
    """How a setting's texts compare with the reference's. tie: gaps below it are rounding, 0: none is."""

    setting: Setting
    temperature: float
    reference: str
    tie: float
    equal: int = 0
    different: list[Different] = []

    @property
    def errors(self) -> list[Different]:
        return [one for one in self.different if one.gap is None or one.gap >= self.tie]


def table(comparisons: Sequence[Comparison]) -> Table:
    rows: list[list[str]] = []
    for c in comparisons:
        gaps = [one.gap for one in c.different if one.gap is not None]
        rows.append(
            [
                c.setting.method,
                c.setting.mode,
                c.setting.transport,
                str(c.setting.threads or "auto"),
                c.reference,
                f"{c.temperature:g}",
                str(c.equal),
                str(len(c.different) - len(c.errors)) if c.tie else "none allowed",
                str(len(c.errors)),
                f"{max(gaps):.1e}" if gaps else "-",
            ]
        )
    columns = ("method", "mode", "transport", "threads", "against", "T", "equal", "ties", "different", "gap")
    return Table("Texts compared with those of plain decoding, and those with transformers'", columns, rows, words=5)


def errors(comparisons: Iterable[Comparison]) -> list[str]:
    """A line for every text that differs by more than a tie."""
    return [
        f"{c.setting}, T = {c.temperature:g}, {one.suite} {one.question_id}: {one.difference} ({one.words}), "
        f"compared with {c.reference}"
        for c in comparisons
        for one in c.errors
    ]
