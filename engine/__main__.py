"""The `talon` command, `python -m engine`, whose first seconds are imports.

Until they are done there is nothing to clean up, and an exception raised inside an import may surface anywhere. So
Ctrl-C ends the process at once, with the same exit code as later.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `talon` command."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background jobs ignore SIGINT
    if heeded:
        signal.signal(signal.SIGINT, _end)
    from engine.cli.main import assemble

    app = assemble()
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
