"""Reports texts that differ from the expected ones, a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from ..report.figures import PEERS, Row

if TYPE_CHECKING:
    from ..report.load_figures import LoadRow
    from ..report.qa_figures import QaRow


def tell_differences(rows: Sequence[Row], console: Console) -> int:
    """Print a line for every text that differs from plain decoding's; returns how many are errors."""
    different = [
        row for row in rows if row.output_equal is False and row.method not in PEERS
    ]  # those round in their own way
    for row in different:
        kind = "a tie that rounding decides" if row.tie else "different text"
        where = f"{row.method}, {row.suite} {row.question_id}, T = {row.temperature:g}"
        console.print(f"{kind}: {where}: {row.difference}")
    return sum(not row.tie for row in different)


def tell_load_differences(rows: Sequence[LoadRow], console: Console) -> int:
    """Print a line for every text that differs from that of its request alone; returns how many are errors."""
    different = [row for row in rows if not row.output_equal]
    for row in different:
        kind = "different text" if row.exact else "different text (the target is not exact)"
        beside = f"{row.concurrency} at once" if row.concurrency else f"arrivals at {row.arrivals:g}"
        console.print(f"{kind}: {row.method}, {row.suite} {row.question_id}, {beside}")
    return sum(row.exact for row in different)


def tell_qa_differences(rows: Sequence[QaRow], console: Console) -> int:
    """Print a line for every text that differs from plain decoding's by more than rounding; returns how many."""
    different = [row for row in rows if not row.output_equal and not row.tie]
    for row in different:
        console.print(f"different text: {row.setting}, {row.method}, {row.kind} {row.question_id}: {row.difference}")
    return len(different)
