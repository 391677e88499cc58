"""When a client disconnects, its work ends, whether it is a stream or a plain call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from engine.tasks import cancel

T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected."""


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and ClientGone raised."""
    return await _first(work, request.receive)


class EventStream(Response):
    """Server-sent events. `events` is closed when it ends and, within a round, when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            try:
                await _first(self._send(send), receive)
            except ClientGone:  # the status has been sent: the log notes the disconnect
                scope["state"]["record"]["client_left"] = True

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self.events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
