"""A folder of checked files that any number of processes share: written in the background, bounded, evicted by use.

There is no index: a file's name is the hash of its key, so a look-up opens it, and nothing can disagree with the files.
A file's time is that of its last use. A failure here costs the cache alone: it is told once, and work goes on.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from stat import S_ISDIR
from threading import Event, Thread

from engine.core.errors import ConfigError, first_line
from engine.files.checked_file import Buffer, Damaged, read_checked, write_checked
from engine.files.removal import removed
from engine.files.whole_file import TEMPORARY

_OURS = re.compile(rf"[0-9a-f]{{64}}\.talon(\.[0-9-]+\{TEMPORARY})?")
_REST = 9  # after a task the thread rests for this multiple of the CPU time that it took: rounds need the cores
_MOST_TASKS = 1 << 16
_CLOSE_S = 3.0  # seconds for the tasks that are left when the cache is closed
_RETRY_S = 10.0  # seconds until a failed write is tried again
_ABANDONED_S = 600.0  # a temporary file of this age has no writer any more
_PAGE = 4096  # a file takes whole pages of the disk
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN}
"""Errors of a disk or a network, not of the folder that the configuration names."""

Task = Callable[[], object]


class CacheFolder:
    """Raises ConfigError if the folder cannot be made or written to. most_bytes: of all files in it. key, bound, fix:
    the option that it belongs to, the one that bounds it, and how another folder is taken, for what is told.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        key: str = "verifier.cache",
        bound: str = "verifier.cache_gb",
        fix: str = "name another",
    ):
        self.folder, self.most_bytes, self._key, self._bound, self._fix = folder, most_bytes, key, bound, fix
        self._told: set[object] = set()  # kinds of errors that were told
        self._open()
        self._retry_s = 0.0
        self._uncounted = most_bytes  # bytes written since files were last counted; at first they never were
        self._unlisted: set[Path] = set()  # shelves whose files cannot be counted: nothing is written there
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._closing, self._overdue = Event(), False
        self._thread = Thread(target=self._work, name="cache", daemon=True)
        self._thread.start()
        self._tasks.put(self._evict)

    def _open(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.stat(self.folder)
        except OSError as error:
            if error.errno not in _PASSING:
                raise self._unusable(first_line(error)) from None
            self._tell_once(error.errno, f"cannot be made ({error.strerror}): nothing is kept")
        else:
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise self._unusable("no permission")

    def path(self, shelf: str, key: bytes) -> Path:
        """Return where the file of that key is. shelf: a subfolder."""
        return self.folder / shelf / f"{key.hex()}.talon"

    def keys(self, shelf: str) -> list[bytes]:
        """Return the keys of the files of a shelf, those used last first."""
        found = []
        for entry in self._files(self.folder / shelf):
            with suppress(OSError):  # another process has removed it, or it cannot be read
                found.append((entry.stat().st_mtime_ns, entry.name))
        return [bytes.fromhex(name[:64]) for _, name in sorted(found, reverse=True) if not name.endswith(TEMPORARY)]

    def read(self, shelf: str, key: bytes, room: memoryview) -> memoryview | None:
        """Return the content of that key, in the first bytes of `room`; None if it is not there. A damaged file, or a
        directory in its place, is removed; any other error may pass, and the file stays.
        """
        path = self.path(shelf, key)
        try:
            return read_checked(path, key, room)
        except FileNotFoundError:
            return None
        except Damaged as error:
            self._tell_once(Damaged, f"{shelf}/{path.name} {error}: ignored; further ones are not told")
        except OSError as error:
            self._tell_once(("read", error.errno), f"{shelf}/{path.name} cannot be read ({error.strerror}): ignored")
            if error.errno != errno.EISDIR:
                return None
        self._later(lambda: removed(path))
        return None

    def keep(self, shelf: str, key: bytes, content: Callable[[], Sequence[Buffer] | None]) -> None:
        """Write a file in the background, unless it is there. content: called by the thread; None says that the content
        is gone.
        """
        self._later(lambda: self._write(self.path(shelf, key), key, content))

    def used(self, shelf: str, keys: Sequence[bytes]) -> None:
        """Note that the files of these keys were used, the first of them last: it is evicted last."""
        now_ns = time.time_ns()
        self._later(lambda: self._touch([self.path(shelf, key) for key in keys], now_ns))

    def close(self) -> None:
        """Write what is left, for some seconds at most."""
        self._closing.set()
        self._tasks.put(None)
        self._thread.join(_CLOSE_S)
        self._overdue = True

    # The rest runs in the thread.

    def _later(self, task: Task) -> None:
        if self._tasks.qsize() < _MOST_TASKS:
            self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._overdue:
            started_s = time.thread_time()
            try:
                task()
            except Exception as error:  # a full disk, most likely; whatever it is, only the cache suffers
                self._failed(error)
            self._closing.wait(_REST * (time.thread_time() - started_s))

    def _failed(self, error: Exception) -> None:
        self._retry_s = time.monotonic() + _RETRY_S
        kind = error.errno if isinstance(error, OSError) else None
        self._tell_once(kind, f"cannot be written ({first_line(error)}): Talon goes on without, and tries again")

    def _write(self, path: Path, key: bytes, content: Callable[[], Sequence[Buffer] | None]) -> None:
        if time.monotonic() < self._retry_s or path.exists():
            return
        if self._uncounted > self.most_bytes // 32:
            self._evict()
        if path.parent in self._unlisted or (parts := content()) is None:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._uncounted += _on_disk(write_checked(path, key, parts))

    def _touch(self, paths: Sequence[Path], now_ns: int) -> None:
        for age, path in enumerate(paths):
            with suppress(OSError):
                os.utime(path, ns=(now_ns, now_ns - 1000 * age))

    def _evict(self) -> None:
        """Remove the files used longest ago until there is space for what is written before the next time. Raises
        OSError if there is none, because files cannot be removed.
        """
        now_s, total, most = time.time(), 0, self.most_bytes // 16 * 15
        found: list[tuple[int, int, str]] = []
        for entry in self._all_files():
            try:
                status = entry.stat()
            except OSError:  # another process has removed it, or it cannot be read
                continue
            total += _on_disk(status.st_size)
            if not entry.name.endswith(TEMPORARY) or now_s - status.st_mtime > _ABANDONED_S:
                found.append((status.st_mtime_ns, _on_disk(status.st_size), entry.path))
        found.sort()
        for _, size, name in found:
            if total <= most:
                break
            if removed(Path(name)):
                total -= size
                with suppress(OSError):
                    Path(name).parent.rmdir()  # if that was the shelf's last one
        if total > most:
            raise OSError(errno.EBUSY, f"{total:,} bytes cannot be removed, more than {self._bound} allows")
        self._uncounted = 0

    def _all_files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files of all shelves, links to shelves included, each once."""
        self._unlisted.clear()
        seen = set[tuple[int, int]]()
        for shelf in self._entries(self.folder):
            try:
                status = os.stat(shelf.path)
            except OSError:
                self._unlisted.add(Path(shelf.path))
                continue
            if S_ISDIR(status.st_mode) and (place := (status.st_dev, status.st_ino)) not in seen:
                seen.add(place)
                yield from self._files(Path(shelf.path))

    def _files(self, shelf: Path) -> Iterator[os.DirEntry[str]]:
        """Yield the files there whose names are ours."""
        return (entry for entry in self._entries(shelf) if _OURS.fullmatch(entry.name))

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """List a folder; an empty list, and one line, if it cannot be read."""
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._unlisted.add(folder)
            self._tell_once(("list", error.errno), f"{folder.name} cannot be read ({error.strerror}): ignored")
            return []

    def _tell_once(self, kind: object, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._tell(text)

    def _tell(self, text: str) -> None:
        print(f"talon: {self._key}={self.folder}: {text}", file=sys.stderr)

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._key}={self.folder}: no folder that can be written to ({reason}); {self._fix}")


def _on_disk(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
