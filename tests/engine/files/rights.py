"""A user without rights, for tests that may run as root, who reads what nobody else may read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[Path]:
    """Give this process the rights of an ordinary user alone, to whom the folder belongs, in this context."""
    folder = Path(tempfile.mkdtemp())  # pytest's own temporary folders are closed to others
    root = os.geteuid() == 0
    try:
        if root:
            os.chown(folder, _NOBODY, _NOBODY)
            os.seteuid(_NOBODY)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for place, _, _ in os.walk(folder):
            os.chmod(place, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
