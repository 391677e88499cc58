"""How far a tuning is, on the disk: whoever runs the same command again goes on from there."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from engine.core.errors import ConfigError, ModelError
from engine.files.removal import removed
from engine.files.whole_file import write_whole

_JOURNAL, _ROWS = "journal.json", "results.jsonl"
_SAVED_S = 2.0  # seconds of answering that a kill may forget


class Progressed(msgspec.Struct):
    """What is done. answering_s: seconds spent on answers. training_minutes: how long to train, None before the answers
    are complete. trained: the head is there. outcome: what is said at the end, "" before; method: which is then the
    best; pays: whether the head is to be installed; installed: it was. compared: the head in use that it is measured
    against, "" if there is none.
    """

    answering_s: float = 0.0
    training_minutes: float | None = None
    trained: bool = False
    outcome: str = ""
    method: str = ""
    pays: bool = False
    installed: bool = False
    compared: str = ""


class TuningJournal:
    """The folder of one tuning: answers, head, rows and `done`, what is done, kept in a file."""

    def __init__(self, folder: Path):
        """Go on with the folder's tuning, or begin one."""
        self.folder, self._file = folder, folder / _JOURNAL
        folder.mkdir(exist_ok=True)
        try:
            self.done = msgspec.json.decode(self._file.read_bytes(), type=Progressed)
        except FileNotFoundError:
            self.done = Progressed()
        except (OSError, msgspec.DecodeError) as error:
            raise ModelError(f"journal={self._file}: cannot be read ({error}): add --again to start over") from None
        self._saved = time.monotonic()

    @property
    def head(self) -> Path:
        return self.folder / "head"

    @property
    def rows(self) -> Path:
        return self.folder / _ROWS

    @property
    def data(self) -> Path:
        """The answers that the head is trained on."""
        return self.folder / "data.jsonl"

    def save(self) -> None:
        write_whole(self._file, msgspec.json.encode(self.done))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count the seconds of the block; `tick` keeps those so far."""
        self._began, self._before = time.monotonic(), self.done.answering_s
        try:
            yield
        finally:
            self.tick(0.0)

    def tick(self, every_s: float = _SAVED_S) -> None:
        now = time.monotonic()
        self.done.answering_s = self._before + now - self._began
        if now - self._saved >= every_s:
            self._saved = now
            self.save()

    def forget_features(self) -> None:
        """Remove what only training reads, of which there are gigabytes."""
        for folder in (*self.folder.glob("features-*"), self.head / "training"):
            shutil.rmtree(folder, ignore_errors=True)


def begin_again(folder: Path) -> None:
    """Remove all of a tuning, what is told of it before what it tells of, since a kill may come in between."""
    for old in (folder / _ROWS, folder / _JOURNAL, *folder.glob("*")):
        if not removed(old):
            raise ModelError(f"tune: {old} cannot be removed: remove it and run the same command again")


@contextmanager
def worked_on_alone(folder: Path) -> Iterator[None]:
    """Make the folder, and let one process at a time work there. Raises ConfigError."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)  # what was asked is nobody else's business
        folder.mkdir(exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ConfigError(f"tune: another process works in {folder}: wait for it, or end it") from None
    except OSError as error:
        raise ConfigError(
            f"tune: {folder} cannot be written ({error.strerror or error}): set TALON_HOME to a folder that you may "
            "write to"
        ) from None
    try:
        yield
    finally:
        lock.release()


def key_of(*settings: object) -> str:
    """Return a short name that changes with any of the settings."""
    return hashlib.blake2b(repr(settings).encode(), digest_size=6).hexdigest()
