"""Numbers on a device that a message takes along between threads of one process.

ZeroMQ carries bytes. Over inproc both ends share the memory, so such numbers stay where they are: they are put aside
under a ticket, which follows the message's frames, and whoever reads the message takes them from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any

from engine.core.errors import ProtocolError


class OnDevice(ABC):
    """Numbers on a device that another thread is given."""

    @abstractmethod
    def take(self) -> Any:
        """Return them for this thread's work, which comes after what made them."""


_waiting: dict[bytes, OnDevice] = {}  # by ticket; threads change it in single operations
_numbers = count(1)


class Aside:
    """What a router has put aside for its present peer. What an earlier one has not taken is dropped."""

    def __init__(self) -> None:
        self._peer, self._tickets = "", list[bytes]()

    def put(self, peer: str, numbers: OnDevice) -> bytes:
        """Put numbers aside for a peer, and return their ticket."""
        if peer != self._peer:
            self.clear()
            self._peer = peer
        ticket = b"%d" % next(_numbers)
        self._tickets = [*(one for one in self._tickets if one in _waiting), ticket]
        _waiting[ticket] = numbers
        return ticket

    def clear(self) -> None:
        """Drop what nobody has taken."""
        for ticket in self._tickets:
            drop(ticket)
        self._tickets = []


def drop(ticket: bytes) -> None:
    """Drop what was put aside under this ticket, whose message was not sent."""
    _waiting.pop(ticket, None)


def taken(ticket: bytes) -> Any:
    """Take what was put aside under this ticket."""
    if (numbers := _waiting.pop(ticket, None)) is None:
        raise ProtocolError("message with numbers that nobody has put aside")
    return numbers.take()
