"""Removes whatever is in a place: a file, a link or a directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def removed(path: Path) -> bool:
    """Remove what is there, and return whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
