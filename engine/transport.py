"""ZeroMQ sockets that speak `engine.messages`.

Every link has one side that binds (a Hub, a ROUTER that serves named peers) and one that connects (a Line, a DEALER).
The front end is the workers' hub; the verifier is the drafter's. Messages that do not follow the protocol are
counted and dropped; a peer that is gone loses what was sent to it, and nobody blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from engine.errors import ProtocolError
from engine.messages import Array, Message, decode, encode


class Line:
    """The connecting side. name: how the hub knows this peer, unique per start."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, name: str, expected: tuple[type, ...]):
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.set_hwm(0)
        self.socket.connect(endpoint)
        self.expected = expected
        self.malformed = 0

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Hand the message to ZeroMQ; never blocks. Without a hub (over inproc, one that has closed) it is lost."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(encode(message, arrays), flags=zmq.NOBLOCK)

    def received(self) -> Iterator[tuple[Any, list[Array]]]:
        """The messages that have arrived."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(flags=zmq.NOBLOCK)
                try:
                    yield decode(frames, self.expected)
                except ProtocolError:
                    self.malformed += 1

    def close(self) -> None:
        self.socket.close()


class Hub:
    """The binding side."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, expected: tuple[type, ...]):
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.set_hwm(0)
        self.socket.bind(endpoint)
        self.expected = expected
        self.malformed = 0

    def send(self, peer: str, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Send to `peer`; dropped if it is gone."""
        self.socket.send_multipart([peer.encode(), *encode(message, arrays)], flags=zmq.NOBLOCK)

    def received(self) -> Iterator[tuple[str, Any, list[Array]]]:
        """The messages that have arrived, each with its sender's name."""
        with contextlib.suppress(zmq.Again):
            while True:
                if (arrival := self.open(self.socket.recv_multipart(flags=zmq.NOBLOCK))) is not None:
                    yield arrival

    def open(self, frames: list[bytes]) -> tuple[str, Any, list[Array]] | None:
        """One arrival's sender, message and arrays; None if it is malformed."""
        try:
            message, arrays = decode(frames[1:], self.expected)
            return frames[0].decode("ascii"), message, arrays
        except (ProtocolError, UnicodeDecodeError):
            self.malformed += 1
            return None

    def close(self) -> None:
        self.socket.close()
