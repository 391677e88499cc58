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
import torch
from torch import Tensor
from transformers import LlamaConfig

from drafters.heads.checkpoint import Checkpoint, TargetWeights
from drafters.heads.growth.policies import Policy, policy_of
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from drafters.hybrid.hybrid import HybridDrafter
from drafters.lookup.suffix import SuffixDrafter
from engine.config import DrafterConfig
from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.drafter_protocol import Drafter, Verdict
from engine.core.hidden_states import HiddenStates, States
from engine.core.outcomes import DraftQuery
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime
from engine.model.cuda.receipt import Receipt
from engine.model.runner import Runner, bfloat16_bits
from engine.sampling.drawn_tree import DrawnTree
from engine.sampling.sampler import Sampler, verify

from .models import kind_of, layout_of

REQUESTS = (1, 8, 32)
_PAST = 512  # positions of each text, where the model reads twice as many
_ACCEPTED = 2  # accepted nodes of each tree below its root
_FORWARD_S = {1: 8.3e-3, 64: 8.7e-3, 1920: 86.6e-3}  # seconds of a forward by its rows, as an H100 took
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
    """What was measured of a round's parts. forward: with the draws behind it. behind: drafts that are launched behind
    these; draft: what is left to draft once the host has read. read: the receipt.
    """

    draft: M
    forward: M
    behind: M
    read: M
    told: M


class Rounds(Generic[M]):
    """Requests with a tree a round. measuring: of one part of a round. states_stay: whether hidden states are taken
    from the device, as within a process; between processes they pass the host. policy: None: that of the head's paper.
    served: draft as by default, with retrieval's nodes, and cut trees to the nodes that pay.
    """

    def __init__(
        self, measuring: Callable[[], AbstractContextManager[M]], runner: Runner, config: LlamaConfig, head: Head,
        requests: int, temperature: float, states_stay: bool = True, policy: Policy | None = None,
        served: bool = False,
    ):  # fmt: skip
        self.measuring, self.runner, self.hidden_size = measuring, runner, config.hidden_size
        self.costs, options = CostModel(ForwardTime(_FORWARD_S)), DrafterConfig()
        usual = policy_of(options, head.published_growth) if served else head.published_growth
        self.head = HeadDrafter(head, policy or usual)
        memories = [SuffixDrafter(options.budget)]
        self.drafter: Drafter = HybridDrafter(self.head, memories, options.budget) if served else self.head
        self.numbers, self.states_stay = range(requests), states_stay
        self.states = [HiddenStates(shared=True) for _ in self.numbers]
        past = min(_PAST, config.max_position_embeddings // 2)
        prompt = [3 + i % 50 for i in range(past)]
        self.sampling = sampling = SamplingParams(temperature=temperature, max_tokens=256)
        self.samplers = [Sampler(sampling, prompt, [], runner.vocab_size) for _ in self.numbers]
        self.caches = [runner.new_cache(past) for _ in self.numbers]
        for number, cache in zip(self.numbers, self.caches, strict=True):
            cache.length = past
            self.drafter.start(number, prompt, sampling)
            root = TokenTree.root_only(prompt[-1])
            self.drafter.observe(number, Verdict(root, [0], [9], self._features(past)))

    def _features(self, rows: int) -> States:
        shape, device = (rows, len(self.drafter.feature_layers), self.hidden_size), self.head.head.device
        states = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return states if self.states_stay else bfloat16_bits(states)

    def read(self, length: int) -> tuple[M, M]:
        """Read a prompt of one more request, and draft for it; return what was measured of both."""
        prompt, number = [3] * length, len(self.numbers)
        sampler = Sampler(self.sampling, prompt, [], self.runner.vocab_size)
        cache, root = self.runner.new_cache(length), TokenTree.root_only(3)
        self.drafter.start(number, prompt, self.sampling)
        with self.measuring() as read:
            segment, layers = Segment.of_text(prompt, cache, "last"), self.drafter.feature_layers
            logits, states = self.runner.run([segment], layers)
            drawn = [DrawnTree(root, sampler, 0)]
            receipt = Receipt(drawn, logits, states, self.runner.pool, states_stay=self.states_stay)
            receipt.wait()
            self.drafter.observe(number, Verdict(root, [0], [9], receipt.read_states(0, length)))
        with self.measuring() as draft:
            self.drafter.propose(number)
        self.drafter.finish(number)
        cache.release()
        return read, draft

    def step(self) -> tuple[Parts[M], int]:
        """Run one round; return what was measured of its parts, and the rows verified."""
        measuring, layers = self.measuring, self.drafter.feature_layers
        with measuring() as draft:
            trees = self.drafter.propose_many([DraftQuery(number, ()) for number in self.numbers])
        if self.drafter.calibrated:
            pay = self.costs.paying_nodes([tree.confidence for tree in trees])
            trees = [tree.keep(nodes) for tree, nodes in zip(trees, pay, strict=True)]
        begins = [*accumulate(map(len, trees), initial=0)]
        with measuring() as forward:
            segments = [Segment.of_tree(tree, cache) for tree, cache in zip(trees, self.caches, strict=True)]
            logits, hidden_states = self.runner.run(segments, layers)
            drawn = [DrawnTree(*part) for part in zip(trees, self.samplers, begins, self.caches, strict=False)]
            receipt = Receipt(drawn, logits, hidden_states, self.runner.pool, len(logits), 0, self.states_stay)
        with measuring() as behind:
            known = receipt.on_device
            sent = (
                None if known is None else self.drafter.draft_behind({number: number for number in self.numbers}, known)
            )
        with measuring() as read:
            receipt.wait(sent)
            verdicts = self._verify(drawn, logits, receipt)
        with measuring() as told:
            self.costs.observe_round(len(trees), len(logits), sum(len(one.tokens) for one in verdicts), 0.0)
            for number, verdict in zip(self.numbers, verdicts, strict=True):
                self.drafter.observe(number, verdict)
            full = [cache.length // BLOCK_SIZE for cache in self.caches]
            self.runner.commit([(cache, one.path) for cache, one in zip(self.caches, verdicts, strict=True)])
            for cache, states, first in zip(self.caches, self.states, full, strict=True):
                for block in range(first, cache.length // BLOCK_SIZE):
                    states.of_block(block)
                cache.trim()
        return Parts(draft, forward, behind, read, told), len(logits)

    def _verify(self, drawn: Sequence[DrawnTree], logits: Tensor, receipt: Receipt) -> list[Verdict]:
        """Verify as the verifier does, once the receipt is there."""
        absent = self.runner.vocab_size - 1
        receipt.take([token for one in drawn for token in _accepting(one.tree, absent)])
        verdicts, prices = [], self.costs.rates(len(drawn), False)
        for i, one in enumerate(drawn):
            rows = logits[one.first : one.first + len(one.tree)]
            path, tokens = verify(one.tree, rows, one.sampler, receipt.known(i))
            if (of_path := receipt.states_of(i, path)) is not None:
                self.states[i].add(one.cache.length, of_path, unsent=True)
            states = self.states[i].take()
            verdicts.append(
                Verdict(one.tree, path, tokens, states, token_s=prices.token_s, row_tokens=prices.row_tokens)
            )
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
