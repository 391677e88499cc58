"""Verifier and drafter in one thread: the same messages, handed over without sockets."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core.params import SamplingParams
from engine.wire.loop_link import LoopRouter
from engine.wire.messages import Finish, Hello, Start

START = Start(request=1, round=0, sampling=SamplingParams())


def hello(hub: LoopRouter) -> str:
    """The drafter joins; its name."""
    hub.line.send(Hello(successors=3))
    [(peer, _, _)] = hub.received()
    return peer


def test_what_a_drafter_says_arrives_with_its_name_once() -> None:
    hub = LoopRouter()
    hub.line.send(Hello(successors=3))
    [(peer, message, arrays)] = hub.received()
    assert (message, arrays) == (Hello(successors=3), []) and peer
    assert [*hub.received()] == []


def test_what_the_verifier_says_arrives_in_order_once() -> None:
    hub = LoopRouter()
    peer = hello(hub)
    hub.send(peer, START, [np.array([5, 6])])
    hub.send(peer, Finish(request=1))
    assert [message for message, _ in hub.line.received()] == [START, Finish(request=1)]
    assert [*hub.line.received()] == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_arrive_in_the_types_of_the_protocol_and_stay_as_they_were_sent(dtype: type) -> None:
    hub = LoopRouter()
    text = np.array([5, 6], dtype)
    hub.send(hello(hub), START, [text])
    text[:] = 0
    [(_, [arrived])] = hub.line.received()
    assert arrived.dtype == np.int32 and arrived.tolist() == [5, 6]


def test_a_message_has_the_arrays_of_the_protocol() -> None:
    hub = LoopRouter()
    with pytest.raises(ValueError, match="argument"):
        hub.send(hello(hub), START)


def test_a_drafter_joins_once() -> None:
    line = LoopRouter().line
    assert [line.joined(), line.joined()] == [True, False]
