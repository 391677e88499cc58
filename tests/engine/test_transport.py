from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.messages import Heartbeat, Hello, Stop
from engine.transport import Hub, Line

Pair = tuple[Hub, Line]


@pytest.fixture(params=["inproc", "ipc"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    endpoint = "inproc://meeting" if request.param == "inproc" else f"ipc://{tmp_path}/meeting"
    with zmq.Context() as context:
        hub, line = Hub(context, endpoint, (Hello, Heartbeat)), Line(context, endpoint, "peer", (Stop,))
        yield hub, line
        hub.close()
        line.close()


def await_arrivals(source: Any, count: int) -> list[Any]:
    arrived: list[Any] = []
    deadline = time.monotonic() + 10
    while len(arrived) < count and time.monotonic() < deadline:
        arrived += source.received()
    return arrived


def test_messages_come_in_order_with_their_senders_name(pair: Pair) -> None:
    hub, line = pair
    line.send(Hello(feature_layers=(1,)))
    line.send(Heartbeat())
    arrived = await_arrivals(hub, 2)
    assert [(name, message) for name, message, _ in arrived] == [
        ("peer", Hello(feature_layers=(1,))),
        ("peer", Heartbeat()),
    ]


def test_the_hub_answers_a_peer_by_name(pair: Pair) -> None:
    hub, line = pair
    line.send(Heartbeat())
    await_arrivals(hub, 1)
    hub.send("peer", Stop())
    assert await_arrivals(line, 1) == [(Stop(), [])]


def test_malformed_messages_are_counted_and_dropped(pair: Pair) -> None:
    hub, line = pair
    for garbage in ([b""], [b"\xff\xff"], [b"a", b"b", b"c"]):
        line.socket.send_multipart(garbage)
    line.send(Heartbeat())
    assert [message for _, message, _ in await_arrivals(hub, 1)] == [Heartbeat()]
    assert hub.malformed == 3


def test_sending_to_a_peer_that_is_gone_neither_blocks_nor_fails(pair: Pair) -> None:
    hub, _ = pair
    for _ in range(100):
        hub.send("nobody", Stop())
