"""The whole protocol on one page: who says what to whom.

    front end -> verifier   Submit, Cancel, Stop      verifier -> front end   Ready, Emitted, PromptsRead, Failed,
                                                                              Heartbeat, Spans
    verifier  -> drafter    Start, RoundVerdict,      drafter  -> verifier    Hello, Draft
                            Finish, Rejoin
    front end -> drafter    Stop                      drafter  -> front end   Ready, Failed, Heartbeat, Spans

A message is a msgpack frame, [struct, shapes], and, if it carries arrays, a second one with their numbers,
little-endian, one array after the other. ARRAYS says which arrays a struct carries; lengths, types and shapes are
checked before anything is used. Nothing is pickled.

Rounds count from 1 per request; round 0 is the prefill, whose verdict carries the first token. A `Draft` names the
outcome it is for: tree `parent` was verified in round - 1, the path ended at `node` and the target then drew `token`.
Drafts may arrive before their verdict: the verifier keeps those of possible outcomes, drops those that did not happen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ProtocolError
from engine.core.params import SamplingParams

Array = NDArray[Any]
HEARTBEAT_S = 0.5  # seconds between two heartbeats of a worker


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the class name is the tag."""


class Submit(Message, frozen=True, kw_only=True):
    """Generate. Arrays: prompt, and the answer's tokens so far if an earlier verifier had begun."""

    request: int
    sampling: SamplingParams


class Cancel(Message, frozen=True, kw_only=True):
    """Forget the request; nothing more is sent for it."""

    request: int


class Stop(Message, frozen=True, kw_only=True):
    """End the worker."""


class Ready(Message, frozen=True, kw_only=True):
    """The worker has loaded. Only the verifier fills in the facts about the target.

    defaults: the sampling settings in the target's files (`own_defaults`). inexact: why a token's logits may depend on
    the other rows of the forward, "" if they do not. eos_tokens: the ids that end an answer. weight_bytes, kv_bytes:
    memory of the weights as they are laid out, and at most of keys and values, 0 if these are not pooled. state_bytes:
    memory at most of the states of requests and of snapshots, of which each takes snapshot_bytes; 0 if all layers have
    keys and values. activations: how products take their rows, bfloat16 (or the model's own type) or int8. weights: the
    type that most matrices are held in, a GGUF type or the model's own. kv_type: the type in which keys and values are
    kept. head: the method whose model drafts, "" if none does.
    """

    vocab_size: int = 0
    context: int = 0
    defaults: SamplingParams = SamplingParams()
    inexact: str = ""
    eos_tokens: tuple[int, ...] = ()
    weight_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    snapshot_bytes: int = 0
    activations: str = "bfloat16"
    kv_type: str = "bfloat16"
    weights: str = "bfloat16"
    head: str = ""

    @property
    def exact(self) -> bool:
        return not self.inexact


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its log-probability, and the likeliest tokens in its place with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """What a round emitted for one request, and what it cost.

    finish_reason: "eos", "stop" (a stop token) or "length" with the last tokens, else None. nodes, depth: of the tree
    verified. hit: the tree had arrived by the previous verdict. round_us: since the previous verdict (or arrival).
    forward_us: of the target in this round, draft_us: of a draft model. busy_us: of all target forwards since the
    verifier started. at_us: the verifier's clock. sources: for each token, the bits of the drafters that proposed it, 0
    if none did. logprobs: one per token, if requested. prompt_logprobs: with the first tokens, for all prompt tokens
    but the first. cached: positions of the text found in the prefix cache. queued_us: from the request's arrival until
    it ran.
    """

    request: int
    round: int
    tokens: tuple[int, ...]
    finish_reason: str | None
    nodes: int
    depth: int = 0
    hit: bool
    round_us: int
    forward_us: int
    draft_us: int
    busy_us: int
    at_us: int
    sources: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached: int = 0
    queued_us: int = 0


class Emitted(Message, frozen=True, kw_only=True):
    """What a round emitted for all requests that took part, in one message, because each message wakes
    the front end.
    """

    tokens: tuple[Tokens, ...]


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a prompt is. read: tokens of `total` whose keys and values are there, `cached` of them from the prefix
    cache. elapsed_us: since the request ran first; left_us: the estimated time until its first token.
    """

    request: int
    read: int
    total: int
    cached: int
    elapsed_us: int
    left_us: int


class PromptsRead(Message, frozen=True, kw_only=True):
    """How far the prompts are of which the coming forward reads a part. Prompts that it reads to the end are left out:
    their tokens follow.
    """

    prompts: tuple[PromptProgress, ...]


class Failed(Message, frozen=True, kw_only=True):
    """A request (or, with request None, the worker's start) failed. kind: a class of engine.core.errors."""

    request: int | None
    kind: str
    text: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """The worker's loop is alive. The verifier adds its load: requests running and waiting for blocks, and how many of
    all blocks of keys and values requests hold (0: each request has a cache of its own).
    """

    running: int = 0
    waiting: int = 0
    held_blocks: int = 0
    blocks: int = 0


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Work that a worker did. start_us: of time.perf_counter."""

    name: str
    request: int
    start_us: int
    duration_us: int
    detail: str = ""


class Spans(Message, frozen=True, kw_only=True):
    """What the worker did since its last Spans; sent only when tracing."""

    spans: tuple[Span, ...]


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Hello(Message, frozen=True, kw_only=True):
    """A drafter has joined. feature_layers: hidden states of the target that it needs; successors: how many of the
    target's likeliest next tokens it needs for every verified node. calibrated: its trees may be cut by their
    confidence. rests: its model can rest when asked to. draft_s, read_s: time of a usual draft of its model, and of a
    position that the model reads, as measured when it was loaded; 0: unknown.
    """

    feature_layers: tuple[int, ...] = ()
    successors: int = 0
    calibrated: bool = False
    rests: bool = False
    draft_s: Seconds = 0.0
    read_s: Seconds = 0.0


class Start(Message, frozen=True, kw_only=True):
    """A request begins (round 0: its prefill is running), or a drafter joins later and drafts from `round` on.

    Arrays: the text so far.
    """

    request: int
    round: int
    sampling: SamplingParams


Figure = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Rates(msgspec.Struct, frozen=True, array_like=True):
    """The present estimates of the verifier's cost model. round_s: time of the next round until its verdict. tokens:
    tokens per request and round. token_s: the time that one more token is worth. row_tokens: what one more row of a
    forward costs, in tokens.
    """

    round_s: Figure = 0.1
    tokens: Figure = 1.0
    token_s: Figure = 0.1
    row_tokens: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0


class RoundVerdict(Message, frozen=True, kw_only=True):
    """The verdict on `draft` (0: a tree the verifier made itself) in `round`.

    ahead: whether to draft for the outcomes of the next round while it runs. root_only: the next round verifies the
    root alone rather than wait for a draft. rest: whether a draft model should rest. rates: for the drafter to judge
    what is worth its time. Arrays: path, tokens, successors, the tokens that the verifier grafted onto the draft
    (`TokenTree.grafted`), tokens of earlier rounds of which there was no verdict, since a draft model that rests alone
    gets none, and features (as bfloat16 bits: heads need no more precision, and a prompt's features take megabytes).
    """

    request: int
    round: int
    draft: int
    ahead: bool = False
    root_only: bool = False
    rest: bool = False
    rates: Rates = Rates()


class Finish(Message, frozen=True, kw_only=True):
    """The request is over."""

    request: int


class Rejoin(Message, frozen=True, kw_only=True):
    """The drafter left too much unread, and messages to it were not sent: it must say Hello again."""


class Draft(Message, frozen=True, kw_only=True):
    """A tree for `round`, for one outcome of the previous round. Arrays: those of the TokenTree.

    draft: its number, from 1. draft_us: spent in the draft model's forwards.
    """

    request: int
    round: int
    draft: int
    parent: int
    node: int
    token: int
    draft_us: int


AnyMessage = Union[  # noqa: UP007 - msgspec reads the union at run time, on Python 3.10 too
    Submit, Cancel, Stop, Ready, Emitted, PromptsRead, Failed, Heartbeat, Spans, Hello, Start, RoundVerdict, Finish,
    Rejoin, Draft,
]  # fmt: skip

# Types and dimensions of arrays; arrays stay aligned as long as smaller numbers come last.
ARRAYS: dict[type, tuple[tuple[str, int], ...]] = {
    Submit: (("int32", 1), ("int32", 1)),
    Start: (("int32", 1),),
    RoundVerdict: (("int32", 1), ("int32", 1), ("int32", 2), ("int32", 1), ("int32", 1), ("uint16", 3)),
    Draft: (("int32", 1), ("int32", 1), ("float32", 1), ("uint32", 1)),
}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[AnyMessage, tuple[tuple[int, ...], ...]])


def encode(message: Message, arrays: Sequence[Array] = ()) -> list[bytes | memoryview]:
    """Return the frames of a message."""
    raw = [np.ascontiguousarray(array, dtype=dtype) for array, (dtype, _) in zip(arrays, _specs(message), strict=True)]
    head = _encoder.encode((message, [array.shape for array in raw]))
    return [head, b"".join(array.data for array in raw)] if raw else [head]


def decode(frames: Sequence[bytes], expected: tuple[type, ...]) -> tuple[Any, list[Array]]:
    """Return the message and its arrays (views of the frames, read-only). Raises ProtocolError for anything else."""
    if not frames:
        raise ProtocolError("message without frames")
    try:
        message, shapes = _decoder.decode(frames[0])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"message is not of the protocol: {error}") from None
    if not isinstance(message, expected):
        raise ProtocolError(f"{type(message).__name__} is not for this receiver")
    specs = _specs(message)
    name = type(message).__name__
    if not (len(specs) == len(shapes) and len(frames) == 1 + bool(specs)):
        raise ProtocolError(f"{name} with {len(shapes)} arrays in {len(frames)} frames, it has {len(specs)}")
    arrays, start, body = [], 0, frames[-1]
    for (dtype, dimensions), shape in zip(specs, shapes, strict=True):
        count, left = math.prod(shape), len(body) - start
        taken = count * np.dtype(dtype).itemsize
        if len(shape) != dimensions or min(shape) < 0 or taken > left:
            raise ProtocolError(f"{name} with an array of shape {shape} in {left} bytes")
        arrays.append(np.frombuffer(body, dtype, count, start).reshape(shape if count else (0,) * dimensions))
        start += taken
    if specs and start != len(body):
        raise ProtocolError(f"{name} with {len(body) - start} bytes too many")
    return message, arrays


def _specs(message: Message) -> tuple[tuple[str, int], ...]:
    return ARRAYS.get(type(message), ())
