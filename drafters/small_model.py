"""SPS: a smaller causal LM of the same vocabulary drafts a chain, or a tree level by level (speculative sampling,
Leviathan et al. 2023; candidates are fixed tokens here, so verification needs no rejection step).

At T > 0 it ranks its candidates with the noise the target will draw with (DESIGN, "Sampling that does not depend on
the drafter"), so that both pick the same token wherever their distributions agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from drafters.base import Drafter, Verdict
from engine.config import Config
from engine.errors import ConfigError, DrafterMismatch
from engine.kv_cache import KVCache
from engine.noise import gumbel
from engine.sampling import SamplingParams
from engine.target import Target, load_config
from engine.tree import TokenTree

SOURCE = 4
_CANDIDATES = 256  # of the draft model's ranking; the shared noise may lift any of them to the top


class _Request:
    """text: all committed tokens; the cache holds a prefix of it."""

    def __init__(self, text: list[int], sampling: SamplingParams, cache: KVCache):
        self.text, self.sampling, self.cache = text, sampling, cache


class SmallModel(Drafter):
    """branches: how many children each node of a level gets, level by level; all 1 is the published chain."""

    def __init__(self, model: Target, branches: Sequence[int], budget: int):
        self.model = model
        self.branches = branches
        self.budget = budget
        self.requests: dict[int, _Request] = {}

    @classmethod
    def from_config(cls, config: Config) -> SmallModel:
        path = config.drafter.path
        if path is None:
            raise ConfigError("drafter.path: method sps needs the directory or hub id of a small model")
        check_same_vocabulary(path, config.model)
        model = Target.load(path, config.dtype, config.device)
        return cls(model, config.drafter.branches or (1,) * config.drafter.length, config.drafter.budget)

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        cache = self.model.new_cache(len(prompt) + sampling.max_tokens + self.budget + len(self.branches))
        self.requests[request] = _Request(list(prompt), sampling, cache)
        if len(prompt) <= self.model.context:
            self._read(self.requests[request], self.requests[request].text[:-1])

    def observe(self, request: int, verdict: Verdict) -> None:
        self.requests[request].text.extend(verdict.tokens)

    def finish(self, request: int) -> None:
        del self.requests[request]

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        state = self.requests[request]
        text = state.text + list(continuation)
        if len(text) + len(self.branches) > self.model.context:
            return TokenTree.root_only(text[-1])
        committed = state.cache.length
        self._read(state, text[committed:-1])
        tree = self._grow(state, text)
        # only what is committed text stays in the cache
        state.cache.length = min(state.cache.length, len(state.text) - 1)
        state.cache.pending = 0
        return tree

    def _read(self, state: _Request, tokens: list[int]) -> None:
        started = time.perf_counter()
        for start in range(0, len(tokens), 512):
            self.model.prefill(state.cache, tokens[start : start + 512])
        self.forward_s += time.perf_counter() - started

    def _grow(self, state: _Request, text: list[int]) -> TokenTree:
        tokens, parents, confidence = [text[-1]], [-1], [1.0]
        level = 0
        for depth, width in enumerate(self.branches):
            tree = TokenTree.from_lists(tokens, parents, confidence, SOURCE)
            if len(tokens) >= self.budget:
                break
            started = time.perf_counter()
            logits, _ = self.model.verify(state.cache, tree, first=level)
            self.forward_s += time.perf_counter() - started
            frontier = range(level, len(tokens))
            level = len(tokens)
            for node, row in zip(frontier, logits, strict=True):
                for token, chance in candidates(row, state.sampling, len(text) + depth, width):
                    if len(tokens) < self.budget:
                        tokens.append(token)
                        parents.append(node)
                        confidence.append(confidence[node] * chance)
        return TokenTree.from_lists(tokens, parents, confidence, SOURCE)


def candidates(logits: Tensor, sampling: SamplingParams, position: int, width: int) -> list[tuple[int, float]]:
    """The `width` likeliest draws at absolute `position`, with the draft model's own probability of each.

    logits: [vocab] float32. Greedy: by probability. Otherwise by log q / T + the shared noise of that position.
    """
    temperature = sampling.temperature or 1.0
    best = (logits / temperature).topk(min(_CANDIDATES if sampling.temperature else width, len(logits)))
    values, tokens = best.values.cpu(), best.indices.cpu()
    normaliser = float(torch.logsumexp(logits / temperature, -1))
    if sampling.temperature:
        order = (values.double() + gumbel(sampling.seed, position, tokens)).argsort(descending=True)[:width]
        values, tokens = values[order], tokens[order]
    return [
        (int(token), min(1.0, math.exp(float(value) - normaliser)))
        for token, value in zip(tokens[:width], values[:width], strict=True)
    ]


def check_same_vocabulary(path: str, model: str) -> None:
    """Raise DrafterMismatch unless the two models share one vocabulary."""
    ours, theirs = (load_config(p).get_text_config().vocab_size for p in (path, model))
    if ours != theirs:
        raise DrafterMismatch(
            f"drafter vocabulary {ours} != target vocabulary {theirs} (drafter.path={path}): "
            "use a small model of the target's family"
        )
    if all((Path(p) / "tokenizer.json").is_file() for p in (path, model)):
        mine, other = (AutoTokenizer.from_pretrained(p).get_vocab() for p in (path, model))
        if mine != other:
            raise DrafterMismatch(
                f"drafter tokenizer != target tokenizer (drafter.path={path}): same size, other tokens; "
                "use a small model of the target's family"
            )
