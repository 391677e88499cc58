"""How long a connection waits for its client, with a small application behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from engine.server.http import protocol
from engine.server.http.protocol import HttpProtocol

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
UPGRADE = POST.replace(b"Host: x", b"Connection: Upgrade\r\nUpgrade: h2c")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PATIENCE_S", 0.2)


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, then takes longer than clients may."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.disconnect":
        return
    await asyncio.sleep(0.5)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@asynccontextmanager
async def connection() -> AsyncIterator[Streams]:
    config, state = uvicorn.Config(slow, lifespan="off", ws="none"), ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.close()


@pytest.mark.parametrize(
    "begun", [b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", POST, POST + b"ab", UPGRADE, UPGRADE + b"ab"]
)
async def test_a_request_that_does_not_go_on_is_ended(begun: bytes) -> None:
    async with connection() as (reader, writer):
        writer.write(begun)
        answer = await asyncio.wait_for(reader.read(), 30)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer


async def test_a_head_that_comes_drop_by_drop_is_ended_all_the_same() -> None:
    async with connection() as (reader, writer):
        answering = asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\n")
        while not answering.done():
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.05)
    assert answering.result().startswith(b"HTTP/1.1 408 ")


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word() -> None:
    async with connection() as (reader, _):
        assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_blank_lines_do_not_keep_a_connection_open() -> None:
    async with connection() as (reader, writer):
        answering = asyncio.create_task(reader.read())
        while not answering.done():
            writer.write(b"\r\n")
            await asyncio.sleep(0.05)


async def test_a_body_that_goes_on_and_an_answer_that_takes_long_are_waited_for() -> None:
    async with connection() as (reader, writer):
        writer.write(POST)
        for letter in b"abcde":
            await asyncio.sleep(0.1)
            writer.write(bytes([letter]))
        writer.write(b"\r\n")  # as some clients do behind a body
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200 ") and await reader.readexactly(2) == b"ok"
