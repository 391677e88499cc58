"""Messages that no worker would send, by the thousand: the drafter drops them and goes on drafting, and the verifier's
text is what it is.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from drafters.heads.head_drafter import HeadDrafter
from drafters.small_model import SmallModel, level_by_level
from engine.config import load
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.drafting.worker import FROM_FRONT_END, FROM_VERIFIER, DrafterWorker
from engine.model.target import Target
from engine.placement import Threads
from engine.verifier.loop import FROM_DRAFTER, Verifier
from engine.verifier.loop import FROM_FRONT_END as ORDERS
from engine.wire.messages import (
    Draft,
    Emitted,
    Failed,
    Finish,
    Heartbeat,
    Hello,
    Message,
    Ready,
    RoundVerdict,
    Start,
    Stop,
    Submit,
    encode,
)
from engine.wire.transport import Dealer, Router


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def random_message(draw: random.Random) -> list[Any]:
    """Frames of a message that is right, wrong in its values, truncated, or noise."""
    request, number = draw.randrange(4), draw.randrange(6)
    tokens = [draw.randrange(-2, 262) for _ in range(draw.randrange(4))]
    path = sorted(draw.randrange(-1, 6) for _ in range(draw.randrange(4)))
    features = np.zeros((draw.randrange(3),) * 3, np.uint16)
    messages: list[tuple[Message, list[Any]]] = [
        (Start(request=request, round=number, sampling=SamplingParams(max_tokens=9)), [tokens]),
        (
            RoundVerdict(request=request, round=number, draft=draw.randrange(6), ahead=number > 2),
            [path, tokens, np.zeros((number, 2), np.int32), tokens[:1], tokens[2:], features],
        ),
        (Finish(request=request), []),
    ]
    return damaged(draw, [bytes(frame) for frame in encode(*draw.choice(messages))])


def damaged(draw: random.Random, frames: list[Any]) -> list[Any]:
    """The frames as they are, or truncated, replaced by noise, one too few or too many."""
    damage = draw.random()
    if damage < 0.1:
        frames[-1] = frames[-1][: draw.randrange(len(frames[-1]) + 1)]
    elif damage < 0.2:
        frames = frames[:-1] or [b""]
    elif damage < 0.3:
        frames[0] = draw.randbytes(draw.randrange(40))
    elif damage < 0.35:
        frames.append(draw.randbytes(8))
    return frames


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_drafter_survives_every_message_and_drafts_as_before(
    context: zmq.Context[Any], tiny_draft: str, count: int
) -> None:
    model = SmallModel(Target.load(tiny_draft))
    front_end = Router(context, "inproc://control", (Ready, Heartbeat, Failed))
    hub = Router(context, "inproc://drafts", (Hello, Draft))
    control = Dealer(context, "inproc://control", "drafter-1", FROM_FRONT_END)
    verdicts = Dealer(context, "inproc://drafts", "drafter-1", FROM_VERIFIER)
    worker = DrafterWorker(HeadDrafter(model, level_by_level([2, 1], 8)), control, verdicts)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    while not any(isinstance(message, Hello) for _, message, _ in hub.received()):
        time.sleep(0.01)  # what comes before it has joined it drops
    draw = random.Random(7)
    for _ in range(count):
        hub.socket.send_multipart([b"drafter-1", *random_message(draw)])
    start = Start(request=99, round=3, sampling=SamplingParams(max_tokens=9)), [[65, 66, 67]]
    hub.send("drafter-1", *start)
    draft = tree = None
    deadline = time.monotonic() + 120
    while draft is None and time.monotonic() < deadline:
        assert thread.is_alive()
        for _, message, arrays in hub.received():
            if isinstance(message, Draft) and message.request == 99:
                draft, tree = message, TokenTree(*arrays)
            elif isinstance(message, Hello):  # it rejoins once for each request of which it seems to miss a verdict
                hub.send("drafter-1", *start)
        time.sleep(0.01)
    assert draft is not None and tree is not None
    assert (draft.round, tree.validate(260).tokens[0]) == (3, 67)
    assert verdicts.malformed > count / 10
    front_end.send("drafter-1", Stop())
    thread.join(30)
    assert not thread.is_alive()


class Liar:
    """A drafter that answers verdicts with trees of no sense, says what nobody asked for, and repeats itself."""

    def __init__(self, context: zmq.Context[Any], draw: random.Random):
        self.line = Dealer(context, "inproc://drafts", "liar", (Start, RoundVerdict, Finish))
        self.draw = draw
        self.told: list[list[Any]] = []
        self.last = (1, 0, 0, 0, 0)  # request, round, draft, node, token of the latest verdict

    def speak(self) -> None:
        for message, arrays in self.line.received():
            if isinstance(message, RoundVerdict):
                path, tokens = arrays[0].tolist(), arrays[1].tolist()
                self.last = (message.request, message.round, message.draft, path[-1], tokens[-1])
        draw = self.draw
        if self.told and draw.random() < 0.2:
            frames = draw.choice(self.told)  # once more, and late
        elif draw.random() < 0.02:
            layers = tuple(draw.randrange(-1, 5) for _ in range(draw.randrange(3)))
            frames = encode(Hello(feature_layers=layers, successors=draw.randrange(4), calibrated=draw.random() < 0.5))
        else:
            frames = damaged(draw, [bytes(frame) for frame in encode(*self.draft())])
        self.told = [*self.told[-50:], frames]
        self.line.socket.send_multipart(frames)

    def draft(self) -> tuple[Draft, list[Any]]:
        """Mostly for the outcome that came true, with a tree that may be none."""
        draw, (request, round_, parent, node, token) = self.draw, self.last
        if draw.random() < 0.3:
            round_, parent, node = (draw.randrange(-1, 9) for _ in range(3))
        n = draw.choice([1, 3, 8, 80])
        parents = [-1] + [draw.randrange(i) if draw.random() < 0.99 else draw.randrange(-3, n) for i in range(1, n)]
        tokens = [token] + [draw.randrange(-1 if draw.random() < 0.01 else 0, 261) for _ in range(1, n)]
        confidence = np.sort(np.random.default_rng(draw.randrange(99)).random(n))[::-1]
        message = Draft(
            request=request,
            round=round_ + 1,
            draft=draw.randrange(60),
            parent=parent,
            node=node,
            token=token,
            draft_us=0,
        )
        arrays = [np.asarray(tokens, np.int32), np.asarray(parents, np.int32), confidence.astype(np.float32)]
        return message, [*arrays, np.zeros(n, np.uint32)]


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_verifiers_text_is_that_of_plain_decoding_whatever_a_drafter_says(
    context: zmq.Context[Any], tiny: str, count: int
) -> None:
    front_end = Router(context, "inproc://control", (Ready, Heartbeat, Failed, Emitted))
    drafts = Router(context, "inproc://drafts", FROM_DRAFTER)
    control = Dealer(context, "inproc://control", "verifier-1", ORDERS)
    config = load({"model": tiny, "method": "pld"}, {"verifier.draft_timeout_s": 0.002, "mode": "async"})
    worker = Verifier(config, Target.load(tiny), control, drafts, Threads(1, 1, 1))
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    sampling = SamplingParams(max_tokens=120, ignore_eos=True)

    def answer(request: int, meanwhile: Any) -> list[int]:
        front_end.send("verifier-1", Submit(request=request, sampling=sampling), [[65, 66, 67], []])
        text: list[int] = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            meanwhile()
            for _, message, _ in front_end.received():
                assert not isinstance(message, Failed), message
                for tokens in message.tokens if isinstance(message, Emitted) else ():
                    text += tokens.tokens if tokens.request == request else ()
                    if tokens.request == request and tokens.finish_reason is not None:
                        return text
        raise AssertionError("no answer")

    expected = answer(1, lambda: time.sleep(0.001))
    liar, said = Liar(context, random.Random(5)), 0

    def lie() -> None:
        nonlocal said
        if said < count:
            liar.speak()
            said += 1
        time.sleep(0 if said < count else 0.001)

    liar.line.send(Hello())
    request = 1
    while said < count:
        request += 1
        assert answer(request, lie) == expected
    assert drafts.malformed > count / 20
    front_end.send("verifier-1", Stop())
    thread.join(30)
    assert not thread.is_alive()
