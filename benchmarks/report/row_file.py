"""The file that a benchmark's rows are written to as they come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

import msgspec


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
