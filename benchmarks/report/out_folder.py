"""The folder that a benchmark writes to: its rows as they come in, its report and its pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

import msgspec
from rich.console import Console

from engine.cli.command import DISK_FULL
from engine.core.errors import ConfigError

from .ratios import compared
from .runs import Run


@contextmanager
def results_in(out: Path) -> Iterator[None]:
    """Make the folder; a full disk is reported in one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: is no folder and cannot be made one ({error.strerror})") from None
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out {out}: cannot be written: name another folder")
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise ConfigError(f"--out {out}: the disk is full: make room, or name another folder") from None


class RowFile:
    """A file of JSON lines. An earlier run's stays until the first row of this one, before which much may be refused.

    begun: called before the first row is written.
    """

    def __init__(self, path: Path, begun: Callable[[], None] = lambda: None):
        self._path, self._begun = path, begun
        self._file: TextIO | None = None

    def write(self, row: msgspec.Struct) -> None:
        if self._file is None:
            self._begun()
            self._file = self._path.open("w", encoding="utf8")
        self._file.write(msgspec.json.encode(row).decode() + "\n")
        self._file.flush()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def write_report(folder: Path, console: Console) -> None:
    """Write report.md and its pictures; without matplotlib, a line says how to get them."""
    try:
        from .page import write
    except ImportError as error:
        console.print(f"no report: {error}; pip install 'talon-decoding[bench]'", markup=False)
        return
    write(folder)
    console.print(f"rows, pictures and report: {folder}")


def compare_runs(folder: Path, other: Path, console: Console) -> None:
    """Print which share of two runs agrees, and what changed."""
    for line in compared(Run.read(folder).ratios(), Run.read(other).ratios(), other):
        console.print(line, highlight=False, soft_wrap=True)
