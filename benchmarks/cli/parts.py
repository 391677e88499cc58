"""The measurements of `talon bench`, `qa` and `evidence`: each prints its table and every text that differs, writes the
report, and returns how many texts differ that must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from ..baselines.compare import run_baselines
from ..baselines.rivals import Rivals
from ..measure.bench import run_bench
from ..measure.load import run_load
from ..measure.plan import MeasurementPlan
from ..measure.qa import run_qa
from ..report import engine_figures, load_figures, qa_figures
from ..report.figures import TRANSFORMERS, Row, speed_tables
from ..report.load_figures import LoadRow
from ..report.out_folder import write_report
from ..report.qa_figures import QaRow, Retrieval
from ..report.tables import Table


async def single(plan: MeasurementPlan, console: Console) -> tuple[int, list[Row]]:
    """Measure one request at a time."""
    rows = await run_bench(plan, console)
    _show(plan, speed_tables(rows), console)
    return _tell(map(_difference, rows), console), rows


async def load(plan: MeasurementPlan, levels: Sequence[int], shares: Sequence[float], console: Console) -> int:
    """Measure many requests, at once or arriving at random."""
    rows = await run_load(plan, levels, shares, console)
    arrivals = [load_figures.arrival_table(rows)] if shares else []
    _show(plan, [load_figures.level_table(load_figures.levels(rows)), *arrivals], console)
    return _tell(map(_load_difference, rows), console)


async def knowledge(
    plan: MeasurementPlan, passages: int, console: Console
) -> tuple[int, Retrieval | None, list[QaRow]]:
    """Measure questions that need knowledge."""
    retrieval, rows = await run_qa(plan, passages, console)
    write_report(plan.out, console)
    return _tell(map(_qa_difference, rows), console), retrieval, rows


def knowledge_tables(rows: Sequence[QaRow]) -> list[Table]:
    return [qa_figures.speed_table(rows), qa_figures.score_table(rows)]


async def baselines(plan: MeasurementPlan, levels: Sequence[int], rivals: Rivals, console: Console) -> int:
    """Measure other engines."""
    turns = await run_baselines(plan, levels, rivals, console)
    _show(plan, [engine_figures.table(turns)], console)
    return 0


def _show(plan: MeasurementPlan, tables: Iterable[Table], console: Console) -> None:
    for table in tables:
        Console().print(table.rich())
    write_report(plan.out, console)


def _tell(differences: Iterable[tuple[str, bool] | None], console: Console) -> int:
    """Print a line for each text that differs, and return how many are errors. differences: a line, and whether it is
    an error.
    """
    found = [one for one in differences if one is not None]
    for line, _ in found:
        console.print(line)
    return sum(is_error for _, is_error in found)


def _difference(row: Row) -> tuple[str, bool] | None:
    """Say how the text differs from plain decoding's. transformers rounds in its own way."""
    if row.output_equal is not False or row.method in TRANSFORMERS:
        return None
    kind = "a tie that rounding decides" if row.tie else "different text"
    where = f"{row.method}, {row.suite} {row.question_id}, T = {row.temperature:g}"
    return f"{kind}: {where}: {row.difference}", not row.tie


def _load_difference(row: LoadRow) -> tuple[str, bool] | None:
    """Say how the text differs from that of the request alone."""
    if row.output_equal:
        return None
    kind = "different text" if row.exact else "different text (the target is not exact)"
    others = f"{row.concurrency} at once" if row.concurrency else f"arrivals at {row.arrivals:g}"
    return f"{kind}: {row.method}, {row.suite} {row.question_id}, {others}", row.exact


def _qa_difference(row: QaRow) -> tuple[str, bool] | None:
    """Say how the text differs from plain decoding's, by more than rounding."""
    if row.output_equal or row.tie:
        return None
    return f"different text: {row.setting}, {row.method}, {row.kind} {row.question_id}: {row.difference}", True
