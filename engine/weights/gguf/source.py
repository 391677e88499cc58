"""The GGUF file, or files, that a directory in the cache describes: the weights stay there."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.core.errors import ModelError
from engine.files.whole_file import write_whole
from engine.weights.gguf.file import GgufFile, parts_of, read_gguf

SOURCE = "source.json"
FORMAT = 5
"""Raise it when what stands in such a directory changes: files are then described again."""
_HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class GgufSource:
    """file: a path, or a name in the directory itself; the first of several parts. size: bytes of all. mtime_ns: of
    the first. head: SHA-256 of the first MiB of each, and of what tells further parts apart.
    """

    file: str
    size: int
    mtime_ns: int
    head: str
    format: int = FORMAT

    @classmethod
    def of(cls, file: Path, name: str) -> GgufSource:
        """Of a file as it is now, which the directory calls `name`. Raises OSError."""
        states, head = [], hashlib.sha256()
        for part in parts_of(file):
            with part.open("rb") as opened:
                states.append(os.fstat(opened.fileno()))
                head.update(opened.read(_HEAD_BYTES))
        for state in states[1:]:
            head.update(repr((state.st_size, state.st_mtime_ns)).encode())
        return cls(name, sum(state.st_size for state in states), states[0].st_mtime_ns, head.hexdigest())

    @property
    def key(self) -> str:
        """Twelve characters that other contents of the file, another file or another format do not have."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def write(self, folder: Path) -> None:
        write_whole(folder / SOURCE, json.dumps(asdict(self)).encode())


def source_of(folder: Path) -> GgufSource | None:
    """What the directory was described from; None if it is not such a directory, or one of another format."""
    try:
        found = json.loads((folder / SOURCE).read_bytes())
        source = GgufSource(**found)
    except (OSError, ValueError, TypeError):
        return None
    return source if source.format == FORMAT else None


def open_gguf(folder: Path) -> GgufFile | None:
    """The file that the directory describes, None if it is another directory.

    Raises ModelError if the file is gone, or not what it was when the directory was made.
    """
    if (source := source_of(folder)) is None:
        return None
    file = folder / source.file
    try:
        now = GgufSource.of(file, source.file)
    except OSError as error:
        raise ModelError(
            f"model={folder}: its GGUF file {error.filename} cannot be read: {error.strerror}; put it back, or name a "
            "model that is there"
        ) from error
    if now != source:
        raise ModelError(f"model={folder}: its GGUF file {file} has changed; name the file itself: model={file}")
    return read_gguf(file, f"model={folder}")
