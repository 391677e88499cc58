"""Messages that no verifier would send, by the thousand: the drafter worker drops them and goes on drafting."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import zmq

from drafters.head import HeadDrafter
from drafters.small_model import SmallModel, level_by_level
from engine.drafter import FROM_FRONT_END, FROM_VERIFIER, DrafterWorker
from engine.messages import Draft, Failed, Finish, Heartbeat, Hello, Message, Ready, Start, Stop, Verdict, encode
from engine.sampling import SamplingParams
from engine.target import Target
from engine.transport import Hub, Line
from engine.tree import TokenTree


def random_message(draw: random.Random) -> list[Any]:
    """Frames of a message that is right, wrong in its values, truncated, or noise."""
    request, number = draw.randrange(4), draw.randrange(6)
    tokens = [draw.randrange(-2, 262) for _ in range(draw.randrange(4))]
    path = sorted(draw.randrange(-1, 6) for _ in range(draw.randrange(4)))
    features = np.zeros((draw.randrange(3),) * 3, np.float32)
    messages: list[tuple[Message, list[Any]]] = [
        (Start(request=request, round=number, sampling=SamplingParams(max_tokens=9)), [tokens]),
        (
            Verdict(request=request, round=number, draft=draw.randrange(6), following=number, ahead=number > 2),
            [path, tokens, features, np.zeros((number, 2), np.int32)],
        ),
        (Finish(request=request), []),
    ]
    frames: list[Any] = [bytes(frame) for frame in encode(*draw.choice(messages))]
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
def test_the_drafter_survives_every_message_and_drafts_as_before(tiny_draft: str, count: int) -> None:
    model = SmallModel(Target.load(tiny_draft))
    context: zmq.Context[Any] = zmq.Context()
    front_end = Hub(context, "inproc://control", (Ready, Heartbeat, Failed))
    hub = Hub(context, "inproc://drafts", (Hello, Draft))
    control = Line(context, "inproc://control", "drafter-1", FROM_FRONT_END)
    verdicts = Line(context, "inproc://drafts", "drafter-1", FROM_VERIFIER)
    worker = DrafterWorker(HeadDrafter(model, level_by_level([2, 1], 8)), control, verdicts)
    thread = threading.Thread(target=worker.run)
    thread.start()
    draw = random.Random(7)
    for _ in range(count):
        hub.socket.send_multipart([b"drafter-1", *random_message(draw)])
    hub.send("drafter-1", Start(request=99, round=3, sampling=SamplingParams(max_tokens=9)), [[65, 66, 67]])
    draft = tree = None
    deadline = time.monotonic() + 120
    while draft is None and time.monotonic() < deadline:
        assert thread.is_alive()
        for _, message, arrays in hub.received():
            if isinstance(message, Draft) and message.request == 99:
                draft, tree = message, TokenTree(*arrays)
        time.sleep(0.01)
    assert draft is not None and tree is not None
    assert (draft.round, tree.validate(260).tokens[0]) == (3, 67)
    assert verdicts.malformed > count / 10
    front_end.send("drafter-1", Stop())
    thread.join(30)
    assert not thread.is_alive()
    context.destroy(linger=0)
