"""All results of the measurements in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError

from . import figures, load_figures, qa_figures, rival_figures
from .cells import Cells
from .figures import Row, read_lines
from .load_figures import LoadRow
from .qa_figures import QaRow
from .rival_figures import Turn


@dataclass(frozen=True)
class Run:
    """The rows of each measurement; empty where one was not made."""

    single: Sequence[Row]
    load: Sequence[LoadRow]
    qa: Sequence[QaRow]
    rivals: Sequence[Turn]

    @classmethod
    def read(cls, folder: Path) -> Run:
        run = cls(
            read_lines(folder / figures.ROWS, Row),
            read_lines(folder / load_figures.ROWS, LoadRow),
            read_lines(folder / qa_figures.ROWS, QaRow),
            read_lines(folder / rival_figures.ROWS, Turn),
        )
        if not any((run.single, run.load, run.qa, run.rivals)):
            raise ConfigError(f"results={folder}: holds no rows: run talon bench first")
        return run

    @property
    def greedy(self) -> Sequence[Row]:
        return [row for row in self.single if row.temperature == 0] or self.single

    def cells(self) -> Cells:
        """The cells of all measurements."""
        single, load = figures.cells(self.single), load_figures.cells(self.load)
        return {**single, **load, **qa_figures.cells(self.qa), **rival_figures.cells(self.rivals)}
