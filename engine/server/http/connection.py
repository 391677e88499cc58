"""Answers of clients that may leave: their work ends then, streamed or not; and a stream is never silent for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from engine.frontend.tasks import cancel

T = TypeVar("T")
QUIET_S = 3.0
"""After so long without an event a stream gets a comment, and where its API has pings one of them: proxies and clients
give up on connections that are silent, and only what is sent shows that a client has gone.
"""
GOES_ON = b": the answer goes on\n\n"
"""The comment of a silent stream that has nothing else to say."""


class ClientGone(Exception):
    """The client has disconnected."""


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, `work` is cancelled and ClientGone raised."""
    return await _first(work, request.receive)


class EventStream(Response):
    """Server-sent events: `opening` at once, then `events`, which are closed when the stream ends and, within a round,
    when the client disconnects. quiet: returns what is sent into a silent stream, by default a comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], opening: bytes = b"", quiet: Callable[[], bytes] = lambda: GOES_ON
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.opening, self.quiet = events, opening, quiet
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            try:
                await _first(self._send(send), receive)
            except ClientGone:  # the status has been sent: the log notes the disconnect
                scope["state"]["record"]["client_left"] = True

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send_part(send, self.opening)
        comments = asyncio.create_task(self._break_silence(send))
        try:
            async for event in self.events:
                await self._send_part(send, event)
        finally:
            await cancel([comments])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _break_silence(self, send: Send) -> None:
        """Send what a silent stream says whenever nothing else was sent for a while."""
        while True:
            quiet_s = time.monotonic() - self._sent_s
            if quiet_s >= QUIET_S:
                await self._send_part(send, self.quiet())
            else:
                await asyncio.sleep(QUIET_S - quiet_s)

    async def _send_part(self, send: Send, part: bytes) -> None:
        self._sent_s = time.monotonic()
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def _first(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return await working
    finally:
        await cancel([working, leaving])


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
