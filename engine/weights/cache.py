"""The cache folder of models that Talon has downloaded or converted. Each model is complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.core.errors import ModelError
from engine.files.progress import Report

_FULL = {errno.ENOSPC, errno.EDQUOT}


def home() -> Path:
    """The cache folder: $TALON_HOME, else talon in the user's cache folder."""
    if given := os.environ.get("TALON_HOME"):
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "talon"


def keep(folder: Path, field: str, needed_bytes: int, build: Callable[[Path], None], report: Report) -> Path:
    """Return `folder`, filled by `build` unless it exists.

    It is built under a temporary name and renamed when all of it is on the disk. Processes that want the same folder
    wait for each other; what a killed process left is removed. field: `KEY=VALUE`, for errors.
    Raises ModelError if there is no room or the cache cannot be written, and whatever `build` raises.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_process(folder, report):
            if not folder.is_dir():  # nobody has built it in the meantime
                for left_over in folder.parent.glob(f".{folder.name}.*.partial"):
                    shutil.rmtree(left_over)
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


_ROOM = "make room, or set TALON_HOME to a folder on a larger disk"


def lock_of(folder: Path) -> Path:
    """The file that one process locks while it makes the folder."""
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
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        build(unfinished)
        for file in unfinished.iterdir():
            file.chmod(0o644)
            _to_disk(file)
        unfinished.chmod(0o755)
        _to_disk(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
