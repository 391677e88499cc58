"""Damages the cache folders while an engine runs: files are cut, overwritten, removed, or copied."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

_WEIGHTS = ".gguf"  # these are copied, and not damaged: a soak downloads nothing


class CacheDamage:
    """folders: the cache folders. counts: of what was done."""

    def __init__(self, folders: list[Path], rng: random.Random):
        self.folders, self.rng = folders, rng
        self.counts: Counter[str] = Counter()

    def strike(self) -> None:
        """Copy all files of one folder, or damage some in one way."""
        folder = self.rng.choice(self.folders)
        if self.rng.random() < 0.2:
            self._copy(folder)
            self.counts["cache copied"] += 1
            return
        files = [file for file in self._files(folder) if file.suffix != _WEIGHTS]
        damage = self.rng.choice(_DAMAGE)
        for file in self.rng.sample(files, min(self.rng.choice((1, 1, 1, 20)), len(files))):
            try:
                damage(file)
            except OSError:  # Talon has removed it meanwhile
                continue
            self.counts["files damaged"] += 1

    def _copy(self, folder: Path) -> None:
        """Put a copy in the place of each file, as `cp -r` of the folder would: another inode, another time."""
        for file in self._files(folder):
            copy = file.with_name(f".{file.name}.copied")
            try:
                shutil.copyfile(file, copy)
                copy.replace(file)
            except OSError:
                copy.unlink(missing_ok=True)

    def _files(self, folder: Path) -> Iterator[Path]:
        """Yield the files of a cache folder, but for locks and what is being written."""
        for place, _, names in os.walk(folder):
            yield from (Path(place) / name for name in sorted(names) if not name.startswith(".") and "." in name)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _overwrite(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 0x55 for byte in file.read_bytes()))


def _replace_by_directory(file: Path) -> None:
    file.unlink()
    (file / "within").mkdir(parents=True)


_DAMAGE: list[Callable[[Path], None]] = [Path.unlink, _cut, _empty, _overwrite, _replace_by_directory]
