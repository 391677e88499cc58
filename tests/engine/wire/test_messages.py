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


def frames_of(message: Message, arrays: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


@pytest.mark.parametrize(("message", "arrays"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_message_survives_the_wire(message: Message, arrays: list[Any]) -> None:
    received, received_arrays = decode(frames_of(message, arrays), EVERY)
    assert received == message
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(arrays, received_arrays, strict=True))


def test_there_is_an_example_of_every_message_with_arrays() -> None:
    assert set(ARRAYS) <= set(EVERY)


def test_empty_features_survive_the_wire() -> None:
    message = RoundVerdict(request=1, round=2, draft=3)
    _, arrays = decode(
        frames_of(message, [INTS, INTS, np.zeros((0, 0), np.int32), INTS, INTS, np.zeros((0, 0, 0), np.uint16)]), EVERY
    )
    assert arrays[5].shape == (0, 0, 0)


def test_a_message_for_somebody_else_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Stop is not for this receiver"):
        decode(frames_of(Stop(), []), (Draft,))


@pytest.mark.parametrize(
    "damage", ["missing arrays", "extra frame", "short array", "long array", "no frames", "not msgpack"]
)
def test_a_damaged_message_is_refused(damage: str) -> None:
    frames = frames_of(*EXAMPLES[-1])
    broken = {
        "missing arrays": frames[:-1],
        "extra frame": [*frames, b"more"],
        "short array": [*frames[:-1], frames[-1][:-1]],
        "long array": [*frames[:-1], frames[-1] + b"more"],
        "no frames": [],
        "not msgpack": [b"\xc1", *frames[1:]],
    }[damage]
    with pytest.raises(ProtocolError):
        decode(broken, EVERY)


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
    _, arrays = decode(
        frames_of(Start(request=1, round=0, sampling=SamplingParams()), [np.array([1, 2], np.int64)]), EVERY
    )
    assert arrays[0].dtype == np.int32 and arrays[0].tolist() == [1, 2]


def test_an_array_without_elements_has_its_own_number_of_dimensions_whatever_the_others_say() -> None:
    frames = frames_of(
        RoundVerdict(request=1, round=2, draft=3),
        [INTS, INTS, np.zeros((0, 3), np.int32), INTS, INTS, np.zeros((5, 0, 7), np.uint16)],
    )
    _, arrays = decode(frames, EVERY)
    assert [array.shape for array in (arrays[2], arrays[5])] == [(0, 0), (0, 0, 0)]


def test_a_message_with_more_or_fewer_arrays_than_it_carries_is_not_sent() -> None:
    with pytest.raises(ValueError):
        encode(Stop(), [INTS])
    with pytest.raises(ValueError):
        encode(EXAMPLES[-1][0], [INTS])


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([], "message without frames"),
        ([b"\xc1"], "message is not of the protocol: "),
        (frames_of(*EXAMPLES[-1])[:-1], "Draft with 4 arrays in 1 frames, it has 4"),
        ([frames_of(*EXAMPLES[-1])[0], b"12"], r"Draft with an array of shape \(3,\) in 2 bytes"),
        ([frames_of(*EXAMPLES[-1])[0], b"1234" * 13], "Draft with 4 bytes too many"),
    ],
)
def test_a_refusal_says_what_was_wrong(frames: list[bytes], told: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{told}"):
        decode(frames, EVERY)


@pytest.mark.parametrize("shape", [(), (2, 2), (-1,)])
def test_an_array_of_another_form_is_refused(shape: tuple[int, ...]) -> None:
    """(2, 2) has as many bytes as the four numbers of the frame."""
    start = frames_of(Start(request=1, round=0, sampling=SamplingParams()), [np.arange(4)])
    message, _ = msgspec.msgpack.decode(start[0])
    with pytest.raises(ProtocolError, match="Start with an array of shape"):
        decode([msgspec.msgpack.encode((message, [shape])), start[1]], EVERY)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize("field", ["round_s", "tokens", "token_s"])
def test_a_rate_that_is_none_is_refused(field: str, wrong: float) -> None:
    message = RoundVerdict(request=1, round=2, draft=3, rates=Rates(**{field: wrong}))
    with pytest.raises(ProtocolError):
        decode(frames_of(message, [INTS, INTS, SUCCESSORS, INTS, INTS, FEATURES]), EVERY)


def test_a_row_may_cost_nothing_and_no_less() -> None:
    for row_tokens, is_known in ((0.0, True), (0.5, True), (-0.1, False), (float("nan"), False)):
        frames = frames_of(
            RoundVerdict(request=1, round=2, draft=3, rates=Rates(row_tokens=row_tokens)),
            [INTS, INTS, SUCCESSORS, INTS, INTS, FEATURES],
        )
        with nullcontext() if is_known else pytest.raises(ProtocolError):
            decode(frames, EVERY)
