"""The GGUF file, or files, that a directory in the cache describes: the weights stay there.

The file is known by the hash of its content. All of it is hashed again when the file system says that the file is
another or was written to since: a copy has the same content, and a file with other weights has not, whatever its time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.core.errors import ModelError
from engine.core.processor import cores
from engine.files.checked_file import Damaged, read_whole, write_checked
from engine.files.whole_file import write_whole
from engine.weights.gguf.file import GgufFile, parts_of, read_gguf

SOURCE = "source.json"
SEEN = "seen.msgpack"
FORMAT = 8
"""Raise it when the contents of such a directory change: files are then described again."""
_HASHED_AT_ONCE = 1 << 20  # bytes that a thread hashes at a time
_TICK_NS = 20_000_000  # step of the clock of file systems: a file may be written to twice within it

States = list[tuple[int, int, int]]
"""Length, time of the last write and of the last change of each part, as the file system says."""


@dataclass(frozen=True)
class GgufSource:
    """The file that a directory of the cache describes. file: a path, or a name in the directory itself; the first of
    several parts. size: bytes of all parts. content: the hash of all of them.
    """

    file: str
    size: int
    content: str
    format: int = FORMAT

    @classmethod
    def of(cls, file: Path, name: str) -> GgufSource:
        """Read all of a file, which the directory calls `name`. Raises OSError."""
        return read_source(file, name)[0]

    @property
    def key(self) -> str:
        """Twelve characters that other contents of the file, another file or another format do not have."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def write(self, folder: Path) -> None:
        write_whole(folder / SOURCE, json.dumps(asdict(self)).encode())


def source_of(folder: Path) -> GgufSource | None:
    """Return what the directory was described from; None if it is not such a directory, or one of another format."""
    try:
        found = json.loads((folder / SOURCE).read_bytes())
        source = GgufSource(**found)
    except (OSError, ValueError, TypeError):
        return None
    return source if source.format == FORMAT else None


def read_source(file: Path, name: str) -> tuple[GgufSource, States]:
    """Read all of a file, and return the source that it is, and its states before it was read. Raises OSError."""
    states, digest = States(), hashlib.sha256()
    for part in parts_of(file):
        with part.open("rb") as content:
            states.append(_state(os.fstat(content.fileno())))
            digest.update(_hash(content, states[-1][0]))
    return GgufSource(name, sum(size for size, *_ in states), digest.hexdigest()), states


def current_source(file: Path, name: str, folders: Iterable[Path]) -> tuple[GgufSource, States]:
    """Find the source that a file is now, and its states. The file is read only if none of these directories has seen
    it as it is. Raises OSError. name: as the directories call it.
    """
    states = _states(file)
    for folder in folders:
        source = source_of(folder)
        if source is not None and source.file == name and _seen(folder, source) == states:
            return source, states
    return read_source(file, name)


def is_unchanged(folder: Path, source: GgufSource) -> bool:
    """Return whether the file still holds what the directory was described from. Raises OSError if it
    cannot be read.
    """
    file = folder / source.file
    states = _states(file)
    if _seen(folder, source) == states:
        return True
    if sum(size for size, *_ in states) != source.size:
        return False
    found, states = read_source(file, source.file)
    if found == source:
        remember(folder, source, states)
    return found == source


def remember(folder: Path, source: GgufSource, states: States) -> None:
    """Note that the file had the source's content in these states. It only saves time, so failing is no error."""
    settled = time.time_ns() - max(changed for *_, changed in states) > _TICK_NS
    if settled and _seen(folder, source) != states:
        with suppress(OSError):
            write_checked(folder / SEEN, _key(source), [msgspec.msgpack.encode(states)])


def open_gguf(folder: Path) -> GgufFile | None:
    """Open the file that the directory describes, None if it is another directory.

    Raises ModelError if the file is gone, or not what it was when the directory was made.
    """
    if (source := source_of(folder)) is None:
        return None
    file = folder / source.file
    try:
        unchanged = is_unchanged(folder, source)
    except OSError as error:
        raise ModelError(
            f"model={folder}: its GGUF file {error.filename} cannot be read: {error.strerror}; put it back, or name a "
            "model that is there"
        ) from error
    if not unchanged:
        raise ModelError(f"model={folder}: its GGUF file {file} has changed; name the file itself: model={file}")
    return read_gguf(file, f"model={folder}")


def _states(file: Path) -> States:
    return [_state(os.stat(part)) for part in parts_of(file)]


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _seen(folder: Path, source: GgufSource) -> States | None:
    """Return what the file system said of the file when its content was last found to be that of the source."""
    try:
        return msgspec.msgpack.decode(read_whole(folder / SEEN, _key(source)), type=States)
    except (OSError, Damaged, msgspec.MsgspecError):
        return None


def _key(source: GgufSource) -> bytes:
    return hashlib.sha256(repr(source).encode()).digest()


def _hash(content: BinaryIO, size: int) -> bytes:
    """Hash the hashes of its parts, which all cores compute."""

    def hash_part(start: int) -> bytes:
        return hashlib.sha256(os.pread(content.fileno(), _HASHED_AT_ONCE, start)).digest()

    with ThreadPoolExecutor(cores()) as threads:
        return hashlib.sha256(b"".join(threads.map(hash_part, range(0, size, _HASHED_AT_ONCE)))).digest()
