"""The environment of the Python processes that the engine starts, and their end with it."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Return this process's environment, in which `python -m engine.NAME` finds this engine, but no module in the
    current folder: a user's script there may be named as a library's optional module, and would run in every worker.
    Python 3.10 still looks there.
    """
    paths = [str(Path(__file__).resolve().parent.parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def end_with_parent() -> None:
    """End this process once its standard input closes, as it does when the process that started it ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
