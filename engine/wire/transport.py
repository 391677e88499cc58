"""ZeroMQ sockets that speak `engine.wire.messages`.

Every link has one side that binds (a `Router`, which serves named peers) and one that connects (a `Dealer`). The front
end has the workers' router, the verifier the drafters'. Messages that do not follow the protocol are counted and
dropped; messages to a peer that is gone are lost, and nobody blocks. What a peer leaves unread may be bounded: beyond
that its router refuses to send. Over tcp a peer may leave and return at any time: ZeroMQ reconnects by itself, pings
detect connections that died silently, and keys keep strangers out.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.core.errors import ConfigError, ProtocolError
from engine.wire.aside import Aside, OnDevice, drop, taken
from engine.wire.keys import Keys, secure_drafter, secure_verifier
from engine.wire.messages import ARRAYS, Array, Message, decode, encode

_PING_MS, _SILENT_MS = 1000, 5000  # over tcp: how often to ping, and after what silence a connection counts as dead
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_REFUSED_S = 60.0  # how long handshakes have to fail until the key is to blame, and not a verifier that is away
_LAST_WORDS_MS = 1000  # maximum time for a closing line to flush what was sent: on a busy machine it takes long
_LARGEST = 1 << 20  # maximum bytes of a message to a router over tcp: a tree of 1024 nodes has 14 kB


class Dealer:
    """The connecting side. name: how the router knows this peer, unique per start. keys: for tcp. unread: maximum
    number of messages that wait here, 0: no maximum; further messages wait at the router.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        name: str,
        expected: tuple[type, ...],
        keys: Keys | None = None,
        unread: int = 0,
    ):
        if (file := _file_of(endpoint)) is not None:
            _check_private(file.parent)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, unread)
        self.endpoint, self.expected = endpoint, expected
        self._in_process = endpoint.startswith("inproc:")
        self.monitor: zmq.Socket[bytes] | None = None
        if endpoint.startswith("tcp:"):
            _ping(self.socket)
            self.monitor = self.socket.get_monitor_socket(_HANDSHAKES)
        self._key_in_doubt = keys is not None  # until the first handshake
        self._refused_since_s: float | None = None
        self._joined = self.monitor is None  # over other transports the router lives as long as the dealer
        if keys is not None:
            secure_drafter(self.socket, keys)
        self.socket.connect(endpoint)
        self.malformed = 0

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Hand the message to ZeroMQ; never blocks. Without a router (over inproc, one that has closed) the message is
        lost.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(encode(message, arrays), flags=zmq.NOBLOCK)

    def received(self) -> Iterator[tuple[Any, list[Array]]]:
        """Yield the messages that have arrived."""
        for frames in _arrived(self.socket):
            try:
                yield self._open(frames)
            except ProtocolError:
                self.malformed += 1

    def _open(self, frames: list[bytes]) -> tuple[Any, list[Array]]:
        """Return a message and its arrays, the last of which may have been put aside."""
        if not (self._in_process and len(frames) == 3):
            return decode(frames, self.expected)
        message, arrays = decode(frames[:2], self.expected)
        return message, [*arrays[:-1], taken(frames[2])]

    def joined(self) -> bool:
        """Return whether the router has been reached, for the first time or again, since the last call."""
        joined, self._joined = self._joined, False
        while self.monitor is not None and self.monitor.poll(0):
            joined |= self._shook_hands(recv_monitor_message(self.monitor)["event"])
        return joined

    def _shook_hands(self, event: int) -> bool:
        """Return whether the event is a successful handshake. Raises ConfigError if it says that the keys can never
        match.
        """
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._key_in_doubt, self._refused_since_s = False, None
            return True
        problem, fix = "does not let this drafter in", "put its drafter.key into the verifier's keys"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            problem, fix = "goes with keys and this drafter without, or the reverse", "give both keys, or neither"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if not self._blames_key(time.monotonic()):
                return False
            problem, fix = "has another key than this drafter's verifier.key", "copy verifier.key from it again"
        raise ConfigError(f"tcp.keys: {self.endpoint} {problem}; {fix}")

    def _blames_key(self, now_s: float) -> bool:
        """Return whether another connection that ended in its handshake shows that the key is wrong. What forwards the
        verifier's port (ssh, a container's proxy) ends connections likewise while the verifier is away.
        """
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        return self._key_in_doubt and now_s - self._refused_since_s >= _REFUSED_S

    def close(self) -> None:
        if self.monitor is not None:
            self.socket.disable_monitor()
        self.socket.close()


class Router:
    """The binding side. keys: for tcp. unread: maximum number of messages that wait here for one peer, 0:
    no maximum.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        expected: tuple[type, ...],
        keys: Keys | None = None,
        unread: int = 0,
    ):
        self._file = _file_of(endpoint)
        if self._file is not None:
            _check_private(self._file.parent)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SNDHWM, unread)
        if unread:  # a message that is not sent then raises an error
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if endpoint.startswith("tcp:"):
            _ping(self.socket)
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # for a peer that is back before its old connection ended
            self.socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        self._authenticator = None if keys is None else secure_verifier(context, self.socket, keys)
        self.endpoint, self.expected = endpoint, expected
        self.in_process = endpoint.startswith("inproc:")
        self._aside = Aside()
        self.malformed = 0
        try:
            self._bind()
        except ConfigError:
            self.close()
            raise

    def _bind(self) -> None:
        try:
            self.socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            field = "tcp.endpoint=" if self.endpoint.startswith("tcp:") else ""
            reason = os.strerror(error.errno or 0).lower()
            raise ConfigError(f"{field}{self.endpoint}: cannot be bound: {reason}; free it or name another") from None

    def restore(self) -> None:
        """Bind again if the socket's file was removed (by a cleaner of temporary files, say). Where that fails,
        connected peers go on, and the next call tries again. A folder that somebody else has made anew is left alone.
        """
        with contextlib.suppress(OSError, ConfigError):
            if self._file is not None and not self._file.exists():
                _check_private(self._file.parent)
                self._bind()

    def send(self, peer: str, message: Message, arrays: Sequence[Any] = ()) -> bool:
        """Send to `peer`; a message to a peer that is gone is lost. Returns False if the peer has left too much unread,
        and the message is not sent. If `in_process`, the last array may be an `OnDevice`.
        """
        if arrays and isinstance(last := arrays[-1], OnDevice):
            ticket = self._aside.put(peer, last)
            absent = np.zeros((0,) * ARRAYS[type(message)][-1][1])
            sent = self._send(peer, [*encode(message, [*arrays[:-1], absent]), ticket])
            if sent is not True:
                drop(ticket)
        else:
            sent = self._send(peer, encode(message, arrays))
        return sent is not False

    def _send(self, peer: str, frames: list[bytes | memoryview]) -> bool | None:
        """Send the frames. Returns False if the peer has left too much unread, None if it is gone."""
        try:
            self.socket.send_multipart([peer.encode(), *frames], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return None
        return True

    def received(self) -> Iterator[tuple[str, Any, list[Array]]]:
        """Yield the messages that have arrived, each with its sender's name."""
        for frames in _arrived(self.socket):
            if (arrival := self.open(frames)) is not None:
                yield arrival

    def open(self, frames: list[bytes]) -> tuple[str, Any, list[Array]] | None:
        """Return one arrival's sender, message and arrays; None if it is malformed."""
        try:
            message, arrays = decode(frames[1:], self.expected)
            return frames[0].decode("ascii"), message, arrays
        except (ProtocolError, UnicodeDecodeError):
            self.malformed += 1
            return None

    def close(self) -> None:
        self.socket.close()
        self._aside.clear()
        if self._authenticator is not None:
            self._authenticator.stop()


def _file_of(endpoint: str) -> Path | None:
    """Return the file of an ipc endpoint; None for other endpoints."""
    return Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None


def _check_private(folder: Path) -> None:
    """Raise ConfigError unless the folder of a socket, which is made if need be, is ours alone: whoever else can write
    there could listen in our place.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ConfigError(f"TMPDIR: {folder} cannot be made: {reason}; set another TMPDIR") from None
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ConfigError(f"TMPDIR: {folder} is not a folder of this user alone; remove it, or set another TMPDIR")


def _arrived(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield the frames of each message. Asking first costs half as much as the exception that says there
    are no more.
    """
    while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[arg-type,operator]
        yield socket.recv_multipart(flags=zmq.NOBLOCK)


def _ping(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
