"""uvicorn's HTTP over one connection, with what it leaves open: a request's head is bounded in length and in time, a
client that has closed its own side still gets its answer, a client of HTTP/1.0 gets a stream that is not chunked, and
a request for another protocol is answered over HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from asyncio import TimerHandle
from collections.abc import Awaitable, Callable
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine.server.errors import ApiError

MOST_HEAD = 64 << 10
"""Bytes of a request line and its headers, before any key is checked."""
MOST_HEADERS = 256
"""Headers of a request: each takes memory, however short it is."""
_HEADER = MOST_HEAD // MOST_HEADERS
PATIENCE_S = 60.0
"""Seconds for a request's head, and between two parts of its body."""
_LOOK_S = 0.1
"""Seconds between checks whether a client that has closed its side is still there."""
_INTERIM_LOOKS = 50
"""Checks until the next interim response is sent to it."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LONG = ApiError(431, f"the request line and headers are over {MOST_HEAD} bytes or {MOST_HEADERS} lines; send less")


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    parser: _Parser

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        self._head = 0  # bytes of the head that the parser has handed over
        self._unparsed = 0  # bytes since the parser last handed something over: it keeps what is incomplete
        self._in_body = False
        self._patience: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    # The length of a request's head: the parser has no limit of its own.

    def data_received(self, data: bytes) -> None:
        if self._patience is None or self._awaits_body:
            self._wait_for_client()
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MOST_HEAD:
            self._refuse(_TOO_LONG)

    def on_message_begin(self) -> None:
        self._head = self._unparsed = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header of a head, or after a chunked body."""
        self._count(len(name) + len(value) + _HEADER)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.reads_again:
            return
        self._in_body, self._unparsed = True, 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[assignment,method-assign]

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.reads_again:
            return
        self._in_body, self._head, self._unparsed = False, 0, 0
        self._stop_waiting()
        super().on_message_complete()

    def _count(self, length: int) -> None:
        self._head, self._unparsed = self._head + length, 0
        if self._head > MOST_HEAD:
            raise OverflowError  # this ends the parser, and `send_400_response` is called

    def send_400_response(self, msg: str) -> None:
        if self._head > MOST_HEAD:
            self._refuse(_TOO_LONG)
        elif not self.transport.is_closing():
            super().send_400_response(msg)

    # How long a client may take.

    def _wait_for_client(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(PATIENCE_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _answers(self) -> bool:
        """Whether a request is being answered, or waits for that."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _awaits_body(self) -> bool:
        """Whether the request that is being answered is still being sent."""
        return self._answers and self.cycle.more_body and not self.pipeline and not self.flow.read_paused

    def _give_up(self) -> None:
        """End a request with which the client has not gone on in time."""
        self._patience = None
        if self._answers and not self._awaits_body:
            self._wait_for_client()
        elif self._head or self._unparsed or self._awaits_body:
            self._refuse(ApiError(408, f"the request did not come within {PATIENCE_S:g} s; send it again"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer with the error unless another answer is under way, and close the connection."""
        awaited = self._awaits_body and not self.cycle.response_started
        if not self.transport.is_closing() and (awaited if self._answers else not self._in_body):
            body = error.body.model_dump_json().encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    # A client that closes its own side sends no more, but may still read.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: until what was sent completely is answered. Over TLS, asyncio
        closes.
        """
        if self.scheme == "https" or not self._answers or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(_LOOK_S, self._look, 0)
        return True

    def _look(self, looks: int) -> None:
        """End the connection of a client that has gone altogether. What is sent to it comes back as an error, so
        something has to be sent: an interim response, which clients of HTTP/1.1 skip, or the answer's own parts.
        """
        if self.transport.is_closing() or not self._answers:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return self.transport.abort()
        may_send = not self.cycle.response_started and not self.pipeline and self.scope["http_version"] == "1.1"
        if may_send and looks % _INTERIM_LOOKS == 0:
            self.transport.write(_INTERIM)
        self.loop.call_later(_LOOK_S, self._look, looks + 1)


class _Parser(HttpRequestParser):
    """Reads a request for another protocol, such as those of Java's clients for HTTP/2, as if it did not ask for that
    (RFC 9110, 7.8). httptools would leave out its body.
    """

    def __init__(self, protocol: HttpProtocol):
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    @property
    def reads_again(self) -> bool:
        """Whether the head that was read now is read once more, without its `Upgrade`."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        rest = memoryview(data)
        while True:
            try:
                return super().feed_data(rest)
            except HttpParserUpgrade as upgrade:
                if not self.reads_again:
                    raise
                rest, head = rest[upgrade.args[0] :], self._head_without_upgrade()
            _Parser.__init__(self, self._protocol)
            super().feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        head = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._protocol.url, self.get_http_version().encode())
        kept = ((name, value) for name, value in self._protocol.headers if name != b"upgrade")
        return head + b"".join(b"%b: %b\r\n" % header for header in kept) + b"\r\n"


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return the cycle's `send` for HTTP/1.0, which has no chunks: an answer of unknown length ends with the
    connection.
    """
    send, endless = cycle.send, False

    async def unchunked(message: Any) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = False if endless else None
        elif endless:
            cycle.expected_content_length = len(message["body"])
        await send(message)

    return unchunked
