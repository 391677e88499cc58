"""A table of cells: the same on a terminal of 80 columns and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.table


@dataclass(frozen=True)
class Table:
    """A table of cells. words: how many of the first columns hold words, which are left-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def rich(self) -> rich.table.Table:
        shown = rich.table.Table(title=self.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for place, column in enumerate(self.columns):
            shown.add_column(column, justify="left" if place < self.words else "right", no_wrap=True)
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        rule = ["---" if place < self.words else "---:" for place in range(len(self.columns))]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.columns, rule, *self.rows])


def p50_p95(values: Sequence[float], scale: float = 1, form: str = ".0f") -> str:
    """Return median and 95th percentile."""
    if not values:
        return "-"
    ranked = sorted(values)
    return "/".join(format(ranked[int(share * len(ranked))] * scale, form) for share in (0.5, 0.95))


def known(value: float | None, form: str, scale: float = 1) -> str:
    """Return a figure, or "-" where there is none."""
    return "-" if value is None else format(value * scale, form)
