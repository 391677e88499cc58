"""The cache folder of models that Talon has downloaded or converted. Each is complete, or it is made anew.

A manifest says what each folder holds. A folder that differs from it has been damaged, or was made by another version.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from engine.core.errors import ModelError
from engine.files.checked_file import Damaged, read_whole, write_checked
from engine.files.digest import sha256_of
from engine.files.progress import Report
from engine.files.removal import removed

MANIFEST = "manifest.msgpack"
_MANIFEST_KEY = hashlib.sha256(b"talon manifest 1").digest()
_ANEW = ".msgpack"  # files that may come and go, and are checked by whoever reads them
_WEIGHTS = ".gguf"  # their contents are checked by `engine.weights.gguf.source`
_MODE = 0o644
_FULL = {errno.ENOSPC, errno.EDQUOT}


def home() -> Path:
    """Return the cache folder: $TALON_HOME, else talon in the user's cache folder."""
    if given := os.environ.get("TALON_HOME"):
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "talon"


def keep(
    folder: Path,
    field: str,
    needed_bytes: int,
    build: Callable[[Path], None],
    report: Report,
    holds: Callable[[Path], bool] = lambda _: True,
) -> Path:
    """Return `folder`, filled by `build` unless it is there, whole, and `holds` what it has to.

    It is built under a temporary name and renamed when all of it is on the disk. Processes that want the same folder
    wait for each other; what a killed process left is removed. field: `KEY=VALUE`, for errors. Raises ModelError if
    there is no space or the cache cannot be written, and whatever `build` raises.
    """
    if is_intact(folder) and holds(folder):
        return folder
    try:
        _clear_way(folder)
        with _only_process(folder, report):
            if not (is_intact(folder) and holds(folder)):  # nobody has built it in the meantime
                for left_over in folder.parent.glob(f".{folder.name}.*.partial"):
                    removed(left_over)
                if os.path.lexists(folder):
                    print(f"talon: {folder} is damaged, or of another version, and is made anew", file=sys.stderr)
                _check_room(folder.parent, field, needed_bytes)
                _build_whole(folder, build)
    except OSError as error:
        if error.errno in _FULL:
            raise ModelError(f"{field}: no space left in {home()}; {_ROOM}") from error
        raise ModelError(
            f"{field}: the cache TALON_HOME={home()} cannot be written ({error.strerror or error}); set TALON_HOME to "
            "a folder that you may write to"
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether the folder holds what its manifest says."""
    try:
        manifest = msgspec.msgpack.decode(read_whole(folder / MANIFEST, _MANIFEST_KEY), type=dict[str, _Stored])
        return all(stored.is_in(folder / name) for name, stored in manifest.items())
    except (OSError, Damaged, msgspec.MsgspecError):
        return False


class _Stored(msgspec.Struct):
    """A file of a folder. sha256: "" for weights."""

    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> _Stored:
        return cls(file.stat().st_size, "" if file.suffix == _WEIGHTS else sha256_of(file))

    def is_in(self, file: Path) -> bool:
        return file.is_file() and file.stat().st_size == self.size and self == _Stored.of(file)


def _clear_way(folder: Path) -> None:
    """Make the folder's parent, and remove what is in the way of it or of the lock, but nothing outside the cache."""
    home().mkdir(parents=True, exist_ok=True)
    for place, is_right in ((folder.parent, Path.is_dir), (lock_of(folder), Path.is_file)):
        if place != home() and os.path.lexists(place) and not is_right(place):
            removed(place)
    folder.parent.mkdir(parents=True, exist_ok=True)


_ROOM = "make room, or set TALON_HOME to a folder on a larger disk"


def lock_of(folder: Path) -> Path:
    """Return the file that one process locks while it makes the folder."""
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def _only_process(folder: Path, report: Report) -> Iterator[None]:
    lock = FileLock(lock_of(folder))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"waiting for another process that makes {folder.name}", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _check_room(where: Path, field: str, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(where).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"{field}: needs {needed_bytes / 1e6:,.0f} MB in {where}, where {free_bytes / 1e6:,.0f} MB are left; "
            f"{_ROOM}"
        )


def _build_whole(folder: Path, build: Callable[[Path], None]) -> None:
    unfinished = _temporary(folder)
    try:
        build(unfinished)
        manifest = {file.name: _Stored.of(file) for file in unfinished.iterdir() if file.suffix != _ANEW}
        write_checked(unfinished / MANIFEST, _MANIFEST_KEY, [msgspec.msgpack.encode(manifest)])
        for file in unfinished.iterdir():
            if file.stat().st_mode & 0o777 != _MODE:
                file.chmod(_MODE)
            _to_disk(file)
        unfinished.chmod(0o755)
        _to_disk(unfinished)
        _put(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _put(made: Path, folder: Path) -> None:
    """Rename what was made to `folder`, in the place of what is there."""
    if os.path.lexists(folder):
        aside = _temporary(folder)
        folder.rename(aside / folder.name)
        made.rename(folder)
        removed(aside)
    else:
        made.rename(folder)


def _temporary(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
