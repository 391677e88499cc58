"""Draft heads of an 8B model, with random weights: do their steps run and capture, and how long do they take?"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.feature_head import FeatureHead
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.device import wait
from engine.model.cuda.graphs import Recorded
from engine.model.runner import bfloat16_bits

from .findings import Record, tried
from .models import HEADS, LLAMA_8B, TOY, kind_of, save_head

_NODES = (1, 4, 8, 16)
_PAST = 40
_REPEATS = 10


def run(device: str) -> Iterator[Record]:
    config = copy.deepcopy(LLAMA_8B if device == "cuda" else TOY)
    config.vocab_size = min(config.vocab_size, 32768)  # a larger one only takes longer to write and read
    with torch.device(device):
        embedding = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16).cpu()
    weights = TargetWeights(embedding, embedding, config.num_hidden_layers)
    for method in HEADS:
        loaded: list[Head] = []
        yield tried(f"{method}, load", _load, method, config, weights, device, loaded)
        for head in loaded:
            for temperature in (0.0, 1.0):
                yield tried(f"{method}, rounds at T={temperature:g}", _rounds, head, config, temperature)
            if isinstance(head, FeatureHead):
                yield tried(f"{method}, steps", _steps, head, config)


def _load(method: str, config: LlamaConfig, weights: TargetWeights, device: str, loaded: list[Head]) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        save_head(method, config, Path(folder), device)
        loaded.append(kind_of(method).load(folder, weights, device))
    return {"stack": type(getattr(loaded[0], "stack", None)).__name__}


def _features(head: Head, config: LlamaConfig, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, len(head.feature_layers), config.hidden_size, generator=generator)


def _rounds(head: Head, config: LlamaConfig, temperature: float) -> Record:
    """Time a verdict and the tree after it, by the growth that the head's paper used. The first token of every tree is
    accepted.
    """
    Recorded.captures = True
    drafter, prompt = HeadDrafter(head, head.published_growth), [3 + i % 50 for i in range(_PAST)]
    drafter.start(1, prompt, SamplingParams(temperature=temperature, max_tokens=64))
    tree = TokenTree.root_only(prompt[-1])
    verdict = Verdict(tree, [0], [9], bfloat16_bits(_features(head, config, _PAST)))
    times, nodes = [], []
    for _ in range(_REPEATS + 2):
        started = time.perf_counter()
        drafter.observe(1, verdict)
        tree = drafter.propose(1)
        times.append(1000 * (time.perf_counter() - started))
        nodes.append(len(tree))
        verdict = Verdict(tree, [0], [7], bfloat16_bits(_features(head, config, 1)))
    drafter.finish(1)
    return {"first_ms": round(times[0], 1), "ms": round(median(times[2:]), 2), "nodes": nodes[-1]}


def _steps(head: Any, config: LlamaConfig) -> Record:
    """Return milliseconds of a step of n nodes: the first, with its capture, and the median of the following."""
    found: Record = {}
    with torch.inference_mode():
        for nodes in _NODES:
            session = head.open([1, 2], 300, 64)
            session.commit(0, _features(head, config, _PAST).to(head.dtype), [3] * _PAST)
            session.root()
            times = []
            for _ in range(_REPEATS + 1):
                session.clear()
                wait(head.device)
                started = time.perf_counter()
                session.extend([0] * nodes, [5 + i for i in range(nodes)])
                wait(head.device)
                times.append(round(1000 * (time.perf_counter() - started), 3))
            session.close()
            found[str(nodes)] = [times[0], median(times[1:])]
    return {"captures": Recorded.captures, "first_and_median_ms": found}
