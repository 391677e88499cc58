"""Shows how far a training is."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

COLUMNS = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
# seconds between two progress lines where no bar is shown, and between two states of a bar
_SAID_S, _SHOWN_S = 60.0, 0.5


class Stage:
    """A stage's progress: a bar on a terminal, a line a minute elsewhere. total: None if it is not known."""

    def __init__(self, progress: Progress, name: str, total: int | None, done: int = 0):
        self._progress, self._name, self._total = progress, name, total
        self._task = progress.add_task(name, total=total, completed=done, figures="")
        self._said_s = time.monotonic()

    def __call__(self, done: int, figures: Callable[[], str] = lambda: "") -> None:
        """Show the progress. figures: called only when they are shown, because reading them makes the
        next step wait.
        """
        self._progress.update(self._task, completed=done)
        console, now_s = self._progress.console, time.monotonic()
        if now_s - self._said_s < (_SHOWN_S if console.is_terminal else _SAID_S):
            return
        self._said_s = now_s
        if console.is_terminal:
            self._progress.update(self._task, figures=figures())
        else:
            of = "" if self._total is None else f" of {self._total}"
            console.print(f"{self._name}: {done}{of}  {figures()}".rstrip(), soft_wrap=True)
