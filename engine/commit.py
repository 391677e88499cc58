"""The commit that Talon was built from. It imports nothing of Talon's, since the build runs it too (hatch_build.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

FILE = "commit.txt"
"""What a wheel and a source distribution hold in the place of a history."""
_DESCRIBE = ("describe", "--always", "--exclude=*", "--abbrev=12", "--dirty= with changes")


def commit_of(root: Path) -> str | None:
    """Return the commit of a clone, and whether files were changed since, or the commit that a distribution names; None
    if neither tells it.
    """
    if (written := root / FILE).is_file():
        return written.read_text("utf8").strip()
    if not (root / ".git").exists():  # a folder above may be a clone of something else
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *_DESCRIBE], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
