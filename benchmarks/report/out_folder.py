"""The folder that a benchmark writes to: its report and its pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from engine.cli.command import DISK_FULL
from engine.core.errors import ConfigError


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


def write_report(folder: Path, console: Console) -> None:
    """report.md, report.html and their pictures; without matplotlib, a line that says how to get them."""
    try:
        from .page import write
    except ImportError as error:
        console.print(f"no report: {error}; pip install 'talon-decoding[bench]'", markup=False)
        return
    write(folder)
    console.print(f"rows, pictures and report: {folder}")


def check_run(folder: Path | None) -> None:
    """Refuse a run to compare with that holds no rows: before anything is measured, not after."""
    from .runs import Run

    if folder is not None:
        Run.read(folder)


def compare_runs(folder: Path, other: Path, console: Console) -> None:
    """Print which share of two runs' cells agrees, and the cells that changed."""
    from .cells import compared
    from .runs import Run

    for line in compared(Run.read(folder).cells(), Run.read(other).cells(), other):
        console.print(line, highlight=False, soft_wrap=True)
