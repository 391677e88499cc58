"""Reads a GGUF file as transformers does: by the reader of the package `gguf`, which it imports when it needs it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.weights.gguf.families import teach_transformers
from engine.weights.gguf.file import GgufFile
from engine.weights.gguf.ternary import I2_S

MODEL = "model.gguf"
_LONG_ARRAY = 1000


@contextmanager
def read_by_transformers(file: GgufFile) -> Iterator[str]:
    """Give a folder in which transformers finds the file, of whatever parts, as MODEL, and no other file.

    The file is read as it was opened. Not for several threads at once.
    """
    teach_transformers()
    opened = [Path(f"/proc/self/fd/{part.content.fileno()}") for part in file.parts]

    class Reader(_ShortReader):
        """A reader that has the tensors of all parts."""

        def __init__(self, path: Any, *options: Any):
            super().__init__(path, *options)
            self.further_parts = [_ShortReader(part) for part in opened[1:]]
            for part in self.further_parts:
                self.tensors.extend(part.tensors)

    usual = gguf.GGUFReader
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / MODEL).symlink_to(opened[0])
        gguf.GGUFReader = Reader
        try:
            yield alone
        finally:
            gguf.GGUFReader = usual


class _ShortReader(gguf.GGUFReader):
    """Leaves out long arrays, those of the vocabulary. The package's reader would make objects of each of their
    numbers, for ten seconds, and transformers uses none: it reads vocabularies in another way. Leaves out tensors of a
    type that the package does not know.
    """

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        super()._build_tensors(start_offs, [field for field in fields if int(field.parts[4][0]) != I2_S])

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            if (count := int(self._get(orig_offs + 4, np.uint64)[0])) > _LONG_ARRAY:
                return self._size(orig_offs + 12, kind, count) + 12, [], [], [gguf.GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _size(self, start: int, kind: gguf.GGUFValueType, count: int) -> int:
        """Return the bytes of an array's values."""
        if (number := self.gguf_scalar_to_np.get(kind)) is not None:
            return int(count * np.dtype(number).itemsize)
        content, at = memoryview(self.data), start
        for _ in range(count):
            at += 8 + int.from_bytes(content[at : at + 8], "little")
        return int(at - start)
