"""All results of the measurements in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.core.errors import ConfigError

from . import engine_figures, figures, load_figures, qa_figures
from .engine_figures import Turn
from .figures import PLAIN, Row
from .load_figures import LoadRow
from .qa_figures import QaRow
from .ratios import Ratios

Line = TypeVar("Line", bound=msgspec.Struct)


@dataclass(frozen=True)
class Run:
    """The rows of each measurement; empty where one was not made."""

    single: Sequence[Row] = ()
    load: Sequence[LoadRow] = ()
    qa: Sequence[QaRow] = ()
    engines: Sequence[Turn] = ()

    @classmethod
    def read(cls, folder: Path) -> Run:
        run = cls(
            _read(folder / figures.ROWS, Row),
            _read(folder / load_figures.ROWS, LoadRow),
            _read(folder / qa_figures.ROWS, QaRow),
            _read(folder / engine_figures.ROWS, Turn),
        )
        if not any((run.single, run.load, run.qa, run.engines)):
            raise ConfigError(f"results={folder}: holds no rows: run talon bench first")
        return run

    @property
    def greedy(self) -> Sequence[Row]:
        return [row for row in self.single if row.temperature == 0] or self.single

    def ratios(self) -> Ratios:
        """Return the ratios of all measurements."""
        single, load = figures.ratios(self.single), load_figures.ratios(self.load)
        found = {**single, **load, **qa_figures.ratios(self.qa), **engine_figures.ratios(self.engines)}
        return {where: some for where, some in found.items() if where[-1] != PLAIN}


def _read(path: Path, kind: type[Line]) -> list[Line]:
    """Read the rows of a file that a benchmark wrote; none where there is no file."""
    try:
        with path.open(encoding="utf8") as lines:
            return [msgspec.json.decode(line, type=kind) for line in lines]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"results={path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"results={path}: is not of this version's talon bench ({error}): run it again") from None
