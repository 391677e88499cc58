"""Are the texts of a method those of plain decoding? The figures of `talon check`.

If the target is exact, every token that differs is an error; if it is not, `benchmarks.measure.ties` tells rounding
from errors. `transformers` shows whether plain decoding itself is right: greedy texts are compared with those of its
generate in float32. Ties are allowed, since a target in bfloat16 rounds where float32 does not: a tie is a gap that
transformers in bfloat16 reverses on these texts too (`benchmarks.measure.ties.most_turned`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..report.figures import Difference
from ..report.tables import Table

TRANSFORMERS = "transformers"


class Setting(msgspec.Struct, frozen=True):
    """An engine that is compared. threads: the verifier's; None: its default."""

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
    """How a setting's texts compare with the reference's. tie: gaps below it are rounding; 0: none is."""

    setting: Setting
    temperature: float
    reference: str
    tie: float
    equal: int = 0
    different: list[Different] = []

    @property
    def ties(self) -> int:
        """Texts that differ where rounding decides."""
        return len(self.different) - len(self.errors)

    @property
    def errors(self) -> list[Different]:
        return [one for one in self.different if one.gap is None or one.gap >= self.tie]


def table(comparisons: Sequence[Comparison]) -> Table:
    """Make a table as wide as a terminal: the number of threads only if it was chosen, `transformers` by its short
    name.
    """
    rows: list[list[str]] = []
    chosen = any(c.setting.threads for c in comparisons)
    for c in comparisons:
        gaps = [one.gap for one in c.different if one.gap is not None]
        rows.append(
            [
                c.setting.method,
                c.setting.mode,
                c.setting.transport,
                *([str(c.setting.threads or "auto")] if chosen else []),
                "hf" if c.reference == TRANSFORMERS else c.reference,
                f"{c.temperature:g}",
                str(c.equal),
                str(c.ties) if c.tie else "-",
                str(len(c.errors)),
                f"{max(gaps):.2g}" if gaps else "-",
            ]
        )
    words = ("method", "mode", "transport", *(["threads"] if chosen else []), "against")
    columns = (*words, "T", "equal", "ties", "wrong", "gap")
    title = "Texts compared with those of plain decoding (none), and of transformers (hf)"
    return Table(title, columns, rows, words=len(words))


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the result in one line."""
    equal, ties = sum(c.equal for c in comparisons), sum(c.ties for c in comparisons)
    wrong = sum(len(c.errors) for c in comparisons)
    near = f"; {ties} differ where rounding decides between two tokens (ties)" if ties else ""
    return f"{equal} of {equal + ties + wrong} texts are equal{near}; {wrong} are wrong"


def errors(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a line for every text that differs by more than a tie."""
    return [
        f"{c.setting}, T = {c.temperature:g}, {one.suite} {one.question_id}: {one.difference} ({one.words}), "
        f"compared with {c.reference}"
        for c in comparisons
        for one in c.errors
    ]
