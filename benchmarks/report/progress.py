"""Shows the progress of long work: a bar for each task on a terminal; elsewhere a line when it begins, and one a
minute.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_SAID_S = 60.0


def progress_bar(console: Console) -> Progress:
    return _Shown(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


class _Shown(Progress):
    _said_s = 0.0

    def add_task(
        self,
        description: str,
        start: bool = True,
        total: float | None = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> TaskID:
        self._say(f"{description}: {total:g} to do" if total else description)
        return super().add_task(description, start, total, completed, visible, **fields)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        if time.monotonic() - self._said_s > _SAID_S:
            task = next(task for task in self.tasks if task.id == task_id)
            self._say(f"{task.description}: {task.completed:g} of {task.total or 0:g}")

    def _say(self, line: str) -> None:
        self._said_s = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
