"""The application without a socket, as replicas call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from engine.server.http.connection import EventStream
from engine.server.http.in_process import HttpHead, HttpRequest, answer

app = FastAPI()
left = asyncio.Event()


@app.post("/echo")
async def echo(request: Request) -> dict[str, str]:
    return {"body": (await request.body()).decode(), "query": str(request.query_params), "who": request.headers["who"]}


@app.get("/parts")
async def parts() -> StreamingResponse:
    return StreamingResponse(iter([b"one", b"two"]), 206)


@app.get("/endless")
async def endless() -> EventStream:
    async def events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: more\n\n"
                await asyncio.sleep(0.01)
        finally:
            left.set()

    return EventStream(events())


def asked(method: str, path: str, body: bytes = b"") -> HttpRequest:
    return HttpRequest(method, path, b"a=1", [(b"who", b"ann")], body)


async def test_an_answer_is_its_head_and_its_parts() -> None:
    head, *rest = [part async for part in answer(app, asked("GET", "/parts"))]
    assert msgspec.msgpack.decode(head, type=HttpHead).status == 206 and rest == [b"one", b"two"]


async def test_the_body_the_query_and_the_headers_arrive() -> None:
    _, body = [part async for part in answer(app, asked("POST", "/echo", b"hello"))]
    assert msgspec.json.decode(body) == {"body": "hello", "query": "a=1", "who": "ann"}


async def test_closing_it_is_the_clients_going_away() -> None:
    async with aclosing(answer(app, asked("GET", "/endless"))) as going_on:
        head, event = await anext(going_on), await anext(going_on)
    assert msgspec.msgpack.decode(head, type=HttpHead).status == 200 and event == b"data: more\n\n"
    await asyncio.wait_for(left.wait(), 5)
