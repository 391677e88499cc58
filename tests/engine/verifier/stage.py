"""A verifier whose rounds a test runs one by one: a target whose every answer is known, and lines that only note what
is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import load
from engine.core.batch import Segment
from engine.core.kv_shape import KVShape
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime
from engine.model.kv_cache import KVCache, commit_all
from engine.model.kv_pool import KVPool
from engine.placement import Threads
from engine.verifier.loop import Verifier
from engine.verifier.request import Request
from engine.wire.messages import (
    Draft,
    Emitted,
    Hello,
    PromptProgress,
    PromptsRead,
    RoundVerdict,
    Submit,
    Tokens,
)
from engine.wire.transport import Router

VOCABULARY, CONTEXT, BLOCKS = 100, 32, 16
DRAFTER = "drafter-1"


class Counting:
    """Behind token t comes t + 1, and next likely t + 2. Features are the tokens."""

    vocab_size, context, layers, key_pieces = VOCABULARY, CONTEXT, 2, 0
    eos_tokens: frozenset[int] = frozenset()
    device, inexact_reason = torch.device("cpu"), ""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.pool = KVPool(KVShape(1, 1, 16, torch.float32), blocks)
        self.forwards: list[list[Segment]] = []
        self.captured: list[tuple[int, ...]] = []

    def capture(self, feature_layers: tuple[int, ...]) -> None:
        self.captured.append(feature_layers)

    def open_cache(self, most: int, tenant: str = "") -> KVCache:
        return KVCache(self.pool)

    def commit(self, accepted: Sequence[tuple[KVCache, Sequence[int]]]) -> None:
        commit_all(accepted)

    def release(self, cache: KVCache) -> None:
        cache.release()

    def run(self, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        self.forwards.append(list(segments))
        wanted = [s.tokens if s.wanted == "all" else s.tokens[-1:] if s.wanted == "last" else [] for s in segments]
        tokens = torch.tensor(np.concatenate(wanted), dtype=torch.int64)
        logits = torch.zeros(len(tokens), VOCABULARY)
        logits[range(len(tokens)), (tokens + 1) % VOCABULARY] = 9.0
        logits[range(len(tokens)), (tokens + 2) % VOCABULARY] = 8.0
        rows = torch.tensor(np.concatenate([s.tokens for s in segments]), dtype=torch.float32)
        return logits, rows[:, None, None] if feature_layers else None


class Wire:
    """A line or a router: what arrives is put into `inbox`, what is sent is found in `sent`. full: no more is sent."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.sent: list[Any] = []
        self.malformed = 0
        self.full = self.in_process = False

    def received(self) -> list[Any]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def send(self, *parts: Any) -> bool:
        if not self.full:
            self.sent.append(parts)
        return not self.full

    def restore(self) -> None: ...


class Stage:
    """A verifier whose rounds the test runs one by one."""

    def __init__(self, hello: Hello | None = None, router: Router | None = None, **options: Any):
        self.control, self.drafts, self.target = Wire(), Wire(), Counting()
        config = load({"model": "counting", "method": "pld"}, options)
        parts: Any = (self.target, self.control, router or self.drafts)
        self.verifier = Verifier(config, *parts, Threads(1, 1, 1))
        # forwards are thought to be so slow that what the test takes for a draft is nothing
        self.verifier.timer.costs = CostModel(ForwardTime({1: 1.0, 256: 1.0}))
        if hello is not None:
            self.drafts.inbox.append((DRAFTER, hello, []))
            self.verifier._receive()

    def submit(self, number: int, prompt: list[int], **sampling: Any) -> Request:
        submit = Submit(request=number, sampling=SamplingParams(**{"max_tokens": 20} | sampling))
        self.control.inbox.append((submit, [np.asarray(prompt), np.zeros(0, np.int32)]))
        self.verifier._receive()
        request = self.verifier.scheduler.find(number)
        assert request is not None
        return request

    def price_model(self, draft_s: float) -> None:
        """From now on a draft of the model is thought to take so long."""
        kind = self.verifier.drafter_link.kinds.model
        assert kind is not None
        kind.draft_s = draft_s

    def draft(self, request: Request, tree: TokenTree, number: int = 1) -> None:
        """The tree for the round to come arrives."""
        round_, parent, node, token = request.outcome
        message = Draft(
            request=request.number, round=round_, draft=number, parent=parent, node=node, token=token, draft_us=0
        )
        arrays = [tree.tokens, tree.parents, tree.confidence, tree.source]
        self.drafts.inbox.append((DRAFTER, message, arrays))
        self.verifier._receive()

    def step(self) -> list[Segment]:
        """One step of all that are there; returns its segments."""
        verifier = self.verifier
        verifier._step(verifier.scheduler.plan(10**18, verifier.timer.costs, verifier.drafter_link.present))
        return self.target.forwards[-1]

    def verdicts(self) -> list[tuple[RoundVerdict, list[Any]]]:
        """Return the verdicts sent since the last look."""
        told = [(parts[1], parts[2]) for parts in self.drafts.sent if isinstance(parts[1], RoundVerdict)]
        self.drafts.sent.clear()
        return told

    def emitted(self) -> list[Tokens]:
        """What the front end was told that requests have emitted."""
        return [
            tokens for message, *_ in self.control.sent if isinstance(message, Emitted) for tokens in message.tokens
        ]

    def progress(self) -> list[PromptProgress]:
        """What the front end was told of prompts under way."""
        return [one for message, *_ in self.control.sent if isinstance(message, PromptsRead) for one in message.prompts]

    def tokens(self, number: int) -> list[int]:
        """What that one has emitted."""
        return [token for round_ in self.emitted() if round_.request == number for token in round_.tokens]


def bushy(root: int, *confidence: float) -> TokenTree:
    """Below the root its true successor t + 1 comes last; the others are wrong."""
    wrong = [(root + 10 * i) % VOCABULARY for i in range(1, len(confidence))]
    return TokenTree.from_lists([root, *wrong, root + 1], [-1] + [0] * len(confidence), [1.0, *confidence])


CALIBRATED, HEAD = Hello(calibrated=True), Hello(feature_layers=(1,))


def positions_sent(told: Sequence[tuple[RoundVerdict, list[Any]]], number: int = 1) -> list[int]:
    """The tokens whose hidden states the verdicts on that request carry."""
    of = [torch.from_numpy(arrays[-1]).view(torch.bfloat16).flatten() for one, arrays in told if one.request == number]
    return [int(token) for token in torch.cat(of).tolist()]
