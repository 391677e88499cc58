"""The `talon` command, `python -m engine`, whose first seconds are imports.

Until they are done there is nothing to clean up, and an exception raised inside an import may surface anywhere. So
Ctrl-C ends the process at once, with the same exit code as later.

A command that is interrupted later does not wait for a download or a conversion in a thread. What such a thread makes
gets its name once it is complete, so the next start does not find a part of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from types import FrameType

INTERRUPTED = 130
_INTERRUPTIONS = (INTERRUPTED, 128 + signal.SIGTERM)
_PATIENCE_S = 1.0
"""For threads that are about to end, so that they remove their unfinished files."""


def main() -> None:
    """Entry point of the `talon` command."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background jobs ignore SIGINT
    if heeded:
        signal.signal(signal.SIGINT, _end)
    from engine.cli.main import assemble

    app = assemble()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an encoding such as Latin-1 lacks characters of answers
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except SystemExit as ended:
        if ended.code in _INTERRUPTIONS:
            signal.signal(signal.SIGINT, _end)
            _end_without_threads(int(ended.code))
        raise


def _end_without_threads(code: int) -> None:
    """End the process if threads go on for which the interpreter would wait."""
    until = time.monotonic() + _PATIENCE_S
    awaited = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    for thread in awaited:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in awaited):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
