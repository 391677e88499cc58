"""Rounds of several requests with a random model, as the engine runs them: each request drafts a tree, one forward
verifies all trees, tokens are drawn, and the drafter is told. The same number of nodes is accepted in every tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor
from transformers import LlamaConfig

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from engine.core.batch import Segment
from engine.core.drafter_protocol import Verdict
from engine.core.outcomes import DraftQuery
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.cuda.receipt import Receipt
from engine.model.drawn_tree import DrawnTree
from engine.model.runner import Runner
from engine.sampling.sampler import Sampler, verify

from .models import kind_of, layout_of

REQUESTS = (1, 8, 32)
_PAST = 512  # positions of each text, where the model reads twice as many
_ACCEPTED = 2  # accepted nodes of each tree below its root
M = TypeVar("M")


Weights = Callable[[str, tuple[int, ...]], Tensor]
"""Makes a tensor of that name and shape, bfloat16."""


def head_of(method: str, config: LlamaConfig, make: Weights) -> Head:
    """Build a draft head of a model of that configuration, on the device of its weights."""
    embedding = make("embed_tokens.weight", (config.vocab_size, config.hidden_size))
    weights = TargetWeights(embedding, embedding, config.num_hidden_layers)
    head: Head = kind_of(method)(_Made(method, config, make), weights, embedding.device)
    return head


class _Made(Checkpoint):
    """A checkpoint of a head that no file holds."""

    def __init__(self, method: str, config: LlamaConfig, make: Weights):
        self.path = self.method = method
        self.field, self.source, self.speculator, self._stored_name = "drafter.path", "config.json", None, str
        self.config, shapes, more = layout_of(method, config)
        self.tensors = {name: make(name, shape) for name, shape in shapes.items()} | more


@dataclass
class Parts(Generic[M]):
    """What was measured of a round's parts."""

    draft: M
    forward: M
    draws: M
    told: M


class Rounds(Generic[M]):
    """Requests with a tree a round. measuring: of one part of a round."""

    def __init__(
        self, measuring: Callable[[], AbstractContextManager[M]], runner: Runner, config: LlamaConfig, head: Head,
        requests: int, temperature: float,
    ):  # fmt: skip
        self.measuring, self.runner, self.hidden_size = measuring, runner, config.hidden_size
        self.drafter = HeadDrafter(head, head.published_growth)
        self.numbers = range(requests)
        past = min(_PAST, config.max_position_embeddings // 2)
        prompt = [3 + i % 50 for i in range(past)]
        sampling = SamplingParams(temperature=temperature, max_tokens=256)
        self.samplers = [Sampler(sampling, prompt, [], runner.vocab_size) for _ in self.numbers]
        self.caches = [runner.new_cache(past) for _ in self.numbers]
        for number, cache in zip(self.numbers, self.caches, strict=True):
            cache.length = past
            self.drafter.start(number, prompt, sampling)
            root = TokenTree.root_only(prompt[-1])
            self.drafter.observe(number, Verdict(root, [0], [9], self._features(past)))

    def _features(self, rows: int) -> np.ndarray:
        return np.zeros((rows, len(self.drafter.feature_layers), self.hidden_size), np.uint16)

    def step(self) -> tuple[Parts[M], int]:
        """Run one round; return what was measured of its parts, and the rows verified."""
        measuring, layers = self.measuring, self.drafter.feature_layers
        with measuring() as draft:
            trees = self.drafter.propose_many([DraftQuery(number, ()) for number in self.numbers])
        with measuring() as forward:
            segments = [Segment.of_tree(tree, cache) for tree, cache in zip(trees, self.caches, strict=True)]
            logits, hidden_states = self.runner.run(segments, layers)
        with measuring() as draws:
            verdicts = self._draw(trees, logits, hidden_states)
        with measuring() as told:
            for number, verdict in zip(self.numbers, verdicts, strict=True):
                self.drafter.observe(number, verdict)
            self.runner.commit([(cache, one.path) for cache, one in zip(self.caches, verdicts, strict=True)])
            for cache in self.caches:
                cache.trim()
        return Parts(draft, forward, draws, told), len(logits)

    def _draw(self, trees: Sequence[TokenTree], logits: Tensor, hidden_states: Tensor | None) -> list[Verdict]:
        """Draw as the verifier does: all is launched after the forward, and waited for once."""
        begins = [*accumulate(map(len, trees), initial=0)]
        parts = zip(trees, self.samplers, begins, self.caches, strict=False)
        receipt = Receipt([DrawnTree(*part) for part in parts], logits, hidden_states, self.runner.pool, len(logits))
        receipt.wait()
        absent = self.runner.vocab_size - 1
        receipt.take([token for tree in trees for token in _accepting(tree, absent)])
        verdicts = []
        for i, (tree, begin, sampler) in enumerate(zip(trees, begins, self.samplers, strict=False)):
            path, drawn = verify(tree, logits[begin : begin + len(tree)], sampler, receipt.known(i))
            verdicts.append(Verdict(tree, path, drawn, receipt.states_of(i, path)))
        return verdicts

    def close(self) -> None:
        for number, cache in zip(self.numbers, self.caches, strict=True):
            self.drafter.finish(number)
            cache.release()


def _accepting(tree: TokenTree, absent: int) -> list[int]:
    """Return what may be drawn at the tree's nodes, so that the most confident ones are accepted, as many as is usual.
    absent: a token that no tree has.
    """
    drawn = [absent] * len(tree)
    for node in tree.path(int(np.flatnonzero(tree.depths == min(_ACCEPTED, tree.depths.max()))[0]))[1:]:
        drawn[int(tree.parents[node])] = int(tree.tokens[node])
    return drawn
