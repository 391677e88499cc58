"""Files that appear whole or not at all: a kill, a full disk or a power cut never leaves part of one under its name."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"
"""The end of a file's name until all of it is written."""


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """Write a file. It gets its name once all of it is written, and on disk if it is to be durable; until then the old
    file stays. mode: who may read and write it, as far as the process's umask lets them.

    Processes and threads may write the same path at once: the last one to finish wins. A killed process leaves a `.tmp`
    file.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write content that is complete, as `whole_file` does."""
    with whole_file(path) as file:
        file.write(content)
