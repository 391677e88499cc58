"""A request while it is decoded, as the verifier knows it, and what one of its rounds came to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.budget import Trust
from engine.messages import Array, Draft
from engine.sampling import SamplingParams
from engine.target import Target
from engine.verification import Sampler

Outcome = tuple[int, int, int, int]
"""What a round came to, for the round after it (its number): the draft verified, the last accepted node, and the token
that the target drew there."""


class Decoding:
    """One request being decoded. text: prompt and answer; the cache holds all of it but the last token, the root."""

    def __init__(self, request: int, prompt: list[int], sampling: SamplingParams, target: Target, budget: int):
        self.request = request
        self.sampling = sampling
        self.text = prompt
        self.unread = list(prompt)
        self.sampler = Sampler(sampling, prompt, target.eos_tokens, target.vocab_size)
        self.cache: Any = target.new_cache(len(prompt) + sampling.max_tokens + budget)
        self.trust = Trust()
        self.round = 0
        self.outcome: Outcome = (0, 0, 0, 0)
        self.drafts: dict[Outcome, tuple[Draft, list[Array]]] = {}
        self.features: list[Array] = []
        self.since_ns = time.perf_counter_ns()
        self.deadline_ns = 0
        self.hit = False
        self.alone = False  # the round to come verifies the root alone


@dataclass(frozen=True)
class Round:
    """What a round came to. draft: the number of the tree verified; path: its accepted nodes; nodes: tokens forwarded;
    features: [path, layers, hidden]; successors: [nodes of the tree, k] int32; depth: layers of nodes below the root.
    """

    draft: int
    path: list[int]
    tokens: list[int]
    nodes: int
    forward_ns: int
    draft_us: int = 0
    features: Tensor | None = None
    successors: Array | None = None
    depth: int = 0
