"""Calls an ASGI application without a socket: a request's bytes in, its answer's bytes out, part by part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from starlette.types import ASGIApp, Message, Scope


class HttpRequest(msgspec.Struct, frozen=True):
    """A request with its complete body."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class HttpHead(msgspec.Struct, frozen=True):
    """What precedes an answer's body."""

    status: int
    headers: list[tuple[bytes, bytes]]


async def answer(app: ASGIApp, request: HttpRequest) -> AsyncGenerator[bytes]:
    """Yield the HttpHead as MessagePack, then the parts of the body as they come. Closing it counts as the client's
    disconnect.
    """
    parts: asyncio.Queue[bytes | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread = [request.body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            parts.put_nowait(msgspec.msgpack.encode(HttpHead(message["status"], list(message["headers"]))))
        elif message["body"]:
            parts.put_nowait(message["body"])

    async def serve() -> None:
        try:
            await app(_scope(request), receive, send)
        finally:
            parts.put_nowait(None)

    serving = asyncio.create_task(serve())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await serving
    finally:
        gone.set()
        await asyncio.gather(serving, return_exceptions=True)


def _scope(request: HttpRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
    }
