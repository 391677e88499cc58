from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.core.errors import ProtocolError
from engine.core.params import SamplingParams
from engine.wire.messages import (
    ARRAYS,
    Cancel,
    Draft,
    Emitted,
    Failed,
    Finish,
    Heartbeat,
    Hello,
    Message,
    PromptProgress,
    PromptsRead,
    Rates,
    Ready,
    RoundVerdict,
    Start,
    Stop,
    Submit,
    Tokens,
    decode,
    encode,
)

INTS = np.array([3, 1, 2], np.int32)
FEATURES, SUCCESSORS = np.ones((2, 1, 4), np.uint16), np.ones((3, 2), np.int32)
EXAMPLES: list[tuple[Message, list[Any]]] = [
    (Submit(request=1, sampling=SamplingParams(temperature=0.5, stop=("x",))), [INTS, INTS]),
    (Cancel(request=1), []),
    (Stop(), []),
    (Ready(vocab_size=10, context=20, inexact="its type is float16"), []),
    (
        Emitted(
            tokens=(
                Tokens(
                    request=1, round=2, tokens=(1, 2), finish_reason=None, nodes=3, hit=True, round_us=4, forward_us=5,
                    draft_us=6, busy_us=7, at_us=8,
                ),
            )
        ),
        [],
    ),
    (Failed(request=None, kind="ModelError", text="no"), []),
    (PromptsRead(prompts=(PromptProgress(request=1, read=16, total=40, cached=8, elapsed_us=5, left_us=6),)), []),
    (Heartbeat(), []),
    (Hello(feature_layers=(1, 2), successors=8), []),
    (Start(request=1, round=0, sampling=SamplingParams()), [INTS]),
    (RoundVerdict(request=1, round=2, draft=3), [INTS, INTS, SUCCESSORS, INTS, INTS, FEATURES]),
    (Finish(request=1), []),
    (
        Draft(request=1, round=2, draft=3, parent=0, node=1, token=5, draft_us=0),
        [INTS, INTS, np.ones(3, np.float32), np.ones(3, np.uint32)],
    ),
]  # fmt: skip
EVERY = tuple(type(message) for message, _ in EXAMPLES)


assert set(ARRAYS) <= set(EVERY)


def frames_of(message: Message, arrays: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


@pytest.mark.parametrize(("message", "arrays"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_message_survives_the_wire(message: Message, arrays: list[Any]) -> None:
    received, received_arrays = decode(frames_of(message, arrays), EVERY)
    assert received == message
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(arrays, received_arrays, strict=True))


def test_ten_thousand_mutated_messages_decode_or_are_refused_and_nothing_else() -> None:
    rng = random.Random(20)
    refused = 0
    for _ in range(10_000):
        frames = frames_of(*rng.choice(EXAMPLES))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(frames))
            frame = bytearray(frames[at])
            action = rng.randrange(5)
            if action == 0 and frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            elif action == 1:
                del frame[rng.randrange(len(frame) + 1) :]
            elif action == 2:
                frame += rng.randbytes(rng.randrange(1, 9))
            elif action == 3:
                frame = bytearray(rng.randbytes(rng.randrange(40)))
            else:
                frames.insert(at, bytes(frame))
            frames[at] = bytes(frame)
        try:
            message, arrays = decode(frames, EVERY)
            assert isinstance(message, EVERY)
            assert len(arrays) == len(ARRAYS.get(type(message), ()))
        except ProtocolError:
            refused += 1
    assert refused > 5_000


def test_arrays_travel_as_the_type_of_the_protocol() -> None:
    start = Start(request=1, round=0, sampling=SamplingParams())
    _, arrays = decode(frames_of(start, [np.array([1, 2], np.int64)]), EVERY)
    assert arrays[0].dtype == np.int32 and arrays[0].tolist() == [1, 2]


def test_an_array_without_elements_has_its_own_number_of_dimensions_whatever_the_others_say() -> None:
    empty = [INTS, INTS, np.zeros((0, 3), np.int32), INTS, INTS, np.zeros((5, 0, 7), np.uint16)]
    _, arrays = decode(frames_of(RoundVerdict(request=1, round=2, draft=3), empty), EVERY)
    assert [array.shape for array in (arrays[2], arrays[5])] == [(0, 0), (0, 0, 0)]


def test_a_message_with_more_or_fewer_arrays_than_it_carries_is_not_sent() -> None:
    with pytest.raises(ValueError):
        encode(Stop(), [INTS])
    with pytest.raises(ValueError):
        encode(EXAMPLES[-1][0], [INTS])


DRAFT = frames_of(*EXAMPLES[-1])


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([], "message without frames"),
        ([b"\xc1", DRAFT[1]], "message is not of the protocol: "),
        (DRAFT[:1], "Draft with 4 arrays in 1 frames, it has 4"),
        ([*DRAFT, b"more"], "Draft with 4 arrays in 3 frames, it has 4"),
        ([DRAFT[0], b"12"], r"Draft with an array of shape \(3,\) in 2 bytes"),
        ([DRAFT[0], DRAFT[1][:-1]], r"Draft with an array of shape \(3,\) in 11 bytes"),
        ([DRAFT[0], DRAFT[1] + b"more"], "Draft with 4 bytes too many"),
        (frames_of(Stop(), []), "Stop is not for this receiver"),
    ],
)
def test_a_refusal_says_what_was_wrong(frames: list[bytes], told: str) -> None:
    expected = tuple(kind for kind in EVERY if kind is not Stop)
    with pytest.raises(ProtocolError, match=f"^{told}"):
        decode(frames, expected)


@pytest.mark.parametrize("shape", [(), (2, 2), (-1,)])
def test_an_array_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    """(2, 2) has as many bytes as the four numbers of the frame."""
    start = frames_of(Start(request=1, round=0, sampling=SamplingParams()), [np.arange(4)])
    message, _ = msgspec.msgpack.decode(start[0])
    with pytest.raises(ProtocolError, match="Start with an array of shape"):
        decode([msgspec.msgpack.encode((message, [shape])), start[1]], EVERY)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("round_s", (0.5,), (NAN, INFINITE, -1.0, 0.0)),
        ("tokens", (0.5,), (NAN, INFINITE, -1.0, 0.0)),
        ("token_s", (0.5,), (NAN, INFINITE, -1.0, 0.0)),
        ("row_tokens", (0.0, 0.5), (-0.1, NAN)),  # a row may cost nothing
    ],
)
def test_a_rate_that_is_none_is_refused(field: str, right: tuple[float, ...], wrong: tuple[float, ...]) -> None:
    for value in (*right, *wrong):
        message = RoundVerdict(request=1, round=2, draft=3, rates=Rates(**{field: value}))
        frames = frames_of(message, [INTS, INTS, SUCCESSORS, INTS, INTS, FEATURES])
        with nullcontext() if value in right else pytest.raises(ProtocolError):
            decode(frames, EVERY)
