"""Verifier and drafter in one thread: the same messages, handed over without sockets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.params import SamplingParams
from engine.wire.loop_link import LoopRouter
from engine.wire.messages import Finish, Hello, RoundVerdict, Start

START = Start(request=1, round=0, sampling=SamplingParams())
Linked = tuple[LoopRouter, str]


@pytest.fixture
def linked() -> Linked:
    """A verifier's side, and the name of the drafter that has joined."""
    router = LoopRouter()
    assert [router.dealer.joined(), router.dealer.joined()] == [True, False]
    router.dealer.send(Hello(successors=3))
    [(peer, message, arrays)] = router.received()
    assert (message, arrays) == (Hello(successors=3), []) and peer
    assert [*router.received()] == []
    return router, peer


def test_what_the_verifier_says_arrives_in_order_once(linked: Linked) -> None:
    router, peer = linked
    router.send(peer, START, [np.array([5, 6])])
    router.send(peer, Finish(request=1))
    assert [message for message, _ in router.dealer.received()] == [START, Finish(request=1)]
    assert [*router.dealer.received()] == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_arrive_in_the_types_of_the_protocol_and_stay_as_they_were_sent(linked: Linked, dtype: type) -> None:
    router, peer = linked
    text = np.array([5, 6], dtype)
    router.send(peer, START, [text])
    text[:] = 0
    [(_, [arrived])] = router.dealer.received()
    assert arrived.dtype == np.int32 and arrived.tolist() == [5, 6]
    with pytest.raises(ValueError, match="argument"):
        router.send(peer, START)  # without the array of the protocol


def test_numbers_on_a_device_arrive_as_they_are(linked: Linked) -> None:
    (router, peer), features = linked, torch.ones(2, 1, 3)
    nothing = [np.zeros(0, np.int32)] * 5
    router.send(peer, RoundVerdict(request=1, round=1, draft=0), [*nothing, features])
    [(_, [*_, arrived])] = router.dealer.received()
    assert arrived is features and router.in_process
