"""Ctrl-C while a head is trained: the step under way ends and is saved, so that nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted(note: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Yields a check whether Ctrl-C was pressed. The first press calls `note`, the next one interrupts as usual.

    Only the main thread can be interrupted; in any other nothing changes.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    usual = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, usual)
        note()

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, usual)
