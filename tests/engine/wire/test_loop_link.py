"""Verifier and drafter in one thread: the same messages, handed over without sockets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.params import SamplingParams
from engine.wire.loop_link import LoopRouter
from engine.wire.messages import Finish, Hello, RoundVerdict, Start

START = Start(request=1, round=0, sampling=SamplingParams())


def hello(router: LoopRouter) -> str:
    """The drafter joins; its name."""
    router.dealer.send(Hello(successors=3))
    [(peer, _, _)] = router.received()
    return peer


def test_what_a_drafter_says_arrives_with_its_name_once() -> None:
    router = LoopRouter()
    router.dealer.send(Hello(successors=3))
    [(peer, message, arrays)] = router.received()
    assert (message, arrays) == (Hello(successors=3), []) and peer
    assert [*router.received()] == []


def test_what_the_verifier_says_arrives_in_order_once() -> None:
    router = LoopRouter()
    peer = hello(router)
    router.send(peer, START, [np.array([5, 6])])
    router.send(peer, Finish(request=1))
    assert [message for message, _ in router.dealer.received()] == [START, Finish(request=1)]
    assert [*router.dealer.received()] == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_arrive_in_the_types_of_the_protocol_and_stay_as_they_were_sent(dtype: type) -> None:
    router = LoopRouter()
    text = np.array([5, 6], dtype)
    router.send(hello(router), START, [text])
    text[:] = 0
    [(_, [arrived])] = router.dealer.received()
    assert arrived.dtype == np.int32 and arrived.tolist() == [5, 6]


def test_a_message_has_the_arrays_of_the_protocol() -> None:
    router = LoopRouter()
    with pytest.raises(ValueError, match="argument"):
        router.send(hello(router), START)


def test_a_drafter_joins_once() -> None:
    dealer = LoopRouter().dealer
    assert [dealer.joined(), dealer.joined()] == [True, False]


def test_numbers_on_a_device_arrive_as_they_are() -> None:
    router, features = LoopRouter(), torch.ones(2, 1, 3)
    nothing = [np.zeros(0, np.int32)] * 5
    router.send(hello(router), RoundVerdict(request=1, round=1, draft=0), [*nothing, features])
    [(_, [*_, arrived])] = router.dealer.received()
    assert arrived is features and router.in_process
