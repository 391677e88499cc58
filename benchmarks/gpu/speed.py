"""Tokens per second of a real checkpoint, plain and drafted, with 1, 8 and 32 requests at once; and how much of a token
is the device's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from drafters import requirements
from drafters.registry import check
from engine import config as configuration
from engine.api import Engine
from engine.core.batch import Segment
from engine.core.errors import TalonError
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.device import wait
from engine.model.target import Target
from engine.weights.resolve import resolved

from .findings import Record, tried
from .times import median_us

_METHODS = ("none", "suffix", "eagle3", "hybrid", "block")
_AT_ONCE = (1, 8, 32)
_QUESTIONS = (
    "Give three tips for staying healthy.", "What is 3 + 4?", "Write a haiku about rivers.", "Why is the sky blue?",
    "Write a Python function that adds two numbers.", "Tell me a story about a cat.", "How do I boil an egg?",
    "List five countries in Europe.",
)  # fmt: skip
_REPEATS = 30
DEFAULT = "smollm2-135m"


def run(device: str, checkpoint: str = DEFAULT) -> Iterator[Record]:
    try:
        requirements.check_paths(resolved(configuration.load({"model": checkpoint, "method": "none"})))
    except TalonError as error:
        yield {"left_out": str(error)}
        return
    yield tried("one token", torch.inference_mode()(_token), checkpoint, device)
    plain: list[list[int]] = []
    for method in _METHODS if device == "cuda" else _METHODS[:2]:
        settings = {"model": checkpoint, "device": device, "dtype": "bfloat16", "method": method}
        yield tried(method, _measure, settings, device, plain)


def _token(checkpoint: str, device: str) -> Record:
    """Return milliseconds of a forward of one row after 64 others, with the host's part, and of its graph alone."""
    found = resolved(configuration.load({"model": checkpoint, "method": "none", "device": device, "dtype": "bfloat16"}))
    target = Target.of_config(found)
    cache = target.new_cache(80)
    target.prefill(cache, [*range(64)])
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        target.run([Segment.of_tree(TokenTree.root_only(1), cache)])
        wait(target.device)
        times.append(1000 * (time.perf_counter() - started))
    record = {"exact": target.exact, "sizes": target.forward_sizes, "whole_ms": round(median(times), 3)}
    graphs: Any = getattr(target.forward, "recorded", {})
    graph = getattr(graphs.get((min(target.forward_sizes), ())), "_graph", None)
    return record if graph is None else record | {"device_ms": round(median_us(graph.replay) / 1000, 3)}


def _measure(settings: dict[str, Any], device: str, plain: list[list[int]]) -> Record:
    try:
        check(resolved(configuration.load(settings)))
    except TalonError as error:
        return {"left_out": str(error)}
    return asyncio.run(_answer(settings, device, plain))


async def _answer(settings: dict[str, Any], device: str, plain: list[list[int]]) -> Record:
    """Return rates by requests at once. The texts of the first engine, one request at a time, are kept in `plain`."""
    tokens = 128 if device == "cuda" else 16
    found: Record = {}
    async with await Engine.start(settings) as engine:
        await engine.generate("Hello", SamplingParams(max_tokens=tokens))
        found["exact"] = engine.target.exact
        for count in _AT_ONCE if device == "cuda" else (1, 2):
            asked = [_QUESTIONS[i % len(_QUESTIONS)] for i in range(count if count > 1 else 2)]
            started = time.perf_counter()
            if count == 1:
                results = [await engine.generate(one, SamplingParams(max_tokens=tokens)) for one in asked]
                plain.extend([] if plain else [r.token_ids for r in results])
            else:
                ways = [SamplingParams(max_tokens=tokens, seed=i) for i in range(count)]
                results = list(await asyncio.gather(*map(engine.generate, asked, ways)))
            seconds = time.perf_counter() - started
            found[f"tokens_per_s_at_{count}"] = round(sum(len(r.token_ids) for r in results) / seconds, 1)
            found[f"tokens_per_round_at_{count}"] = round(
                sum(r.metrics.mean_accepted_tokens for r in results) / len(results), 2
            )
            same = [r.token_ids == text for r, text in zip(results, plain, strict=False)]
            if not all(same):
                found["failed"] = f"{same.count(False)} of {len(same)} texts differ with {count} at once"
    return found
