"""The link between verifier and drafter when both take turns in one thread: the same messages, neither encoded nor
sent. After a forward, with cold caches, encoding and sending would take a quarter of a millisecond of every round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.wire.messages import ARRAYS, Array, Message

_PEER = "in the loop"


class LoopDealer:
    """The drafter's end, like `Dealer`. Arrays arrive as copies in the protocol's types, since senders reuse theirs.
    What is on a device arrives as it is.
    """

    socket = monitor = None

    def __init__(self) -> None:
        self.malformed = 0
        self.arrived: deque[tuple[Any, list[Array]]] = deque()
        self.sent: deque[tuple[Any, list[Array]]] = deque()
        self._joined = True

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        self.sent.append((message, _copies(message, arrays)))

    def received(self) -> Iterator[tuple[Any, list[Array]]]:
        """Yield the messages that have arrived."""
        while self.arrived:
            yield self.arrived.popleft()

    def joined(self) -> bool:
        """Return whether this is the first call."""
        joined, self._joined = self._joined, False
        return joined

    def close(self) -> None:
        """Do nothing: there is nothing to flush."""


class LoopRouter:
    """The verifier's end, like `Router`, with one peer: `dealer`."""

    socket = None
    in_process = True

    def __init__(self) -> None:
        self.malformed = 0
        self.dealer = LoopDealer()

    def send(self, peer: str, message: Message, arrays: Sequence[Array] = ()) -> bool:
        """Deliver the message. It is never refused: the drafter reads all that has arrived before the next round."""
        assert peer == _PEER
        self.dealer.arrived.append((message, _copies(message, arrays)))
        return True

    def received(self) -> Iterator[tuple[str, Any, list[Array]]]:
        """Yield the messages that have arrived, each with its sender's name."""
        while self.dealer.sent:
            yield _PEER, *self.dealer.sent.popleft()

    def restore(self) -> None:
        """Do nothing: there is no socket file to restore."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _copies(message: Message, arrays: Sequence[Array]) -> list[Array]:
    given = zip(arrays, ARRAYS.get(type(message), ()), strict=True)
    return [np.array(array, dtype) if isinstance(array, np.ndarray) else array for array, (dtype, _) in given]
