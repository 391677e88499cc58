"""Shows the progress of work that takes a while, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, float, float], None]
"""A report is called with what is being done, how much of it is done, and how much there is; 0 where that
is not known.
"""


@contextmanager
def shown() -> Iterator[Report]:
    """Show a bar for each stage on a terminal, a line for each elsewhere, and nothing until a stage is reported."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(stage: str, done: float, total: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=None)
                if not console.is_terminal:
                    console.print(f"talon: {stage}", soft_wrap=True, highlight=False, markup=False)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield report
