"""A model of an 8B shape with random weights. Is it exact and captured, how long do verifications take after short and
long texts, and which kernels take that time? Random weights say nothing of text or acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from engine.core.tree import TokenTree
from engine.device import wait
from engine.model.cuda.graphs import Recorded
from engine.model.target import Target

from .findings import Record, tried
from .models import LLAMA_8B, TOY, random_weight
from .rounds import REQUESTS, Rounds, head_of
from .times import median_us

_SIZES = (1, 8, 16, 32, 64, 65, 128)  # nodes of a tree
_BEHIND = (512, 4096, 16384)
_REPEATS = 10
_WARM_UPS = 3  # rounds that are not timed
_KERNELS = 8  # kernels named in a breakdown
_DRAFT_STEPS = 6
_ROUNDS = (("eagle3", 0.0), ("eagle3", 1.0), ("block", 0.0))


def run(device: str) -> Iterator[Record]:
    model: dict[str, Any] = {}
    yield tried("load", _load, device, model)
    if not model:
        return
    target: Target = model["target"]
    for past in _BEHIND if device == "cuda" else (48,):
        cache = target.new_cache(past + max(_SIZES))
        yield tried(f"prefill {past}", _prefill, target, cache, past)
        yield tried(f"verify behind {past}", _verify, target, cache, _SIZES if device == "cuda" else (1, 8))
        if device == "cuda":
            yield tried(f"kernels behind {past}", _breakdown, target, cache)
        target.release(cache)
    for method, temperature in _ROUNDS:
        for requests in REQUESTS if device == "cuda" else REQUESTS[:2]:
            yield tried(
                f"rounds of {method}, T={temperature:g}",
                torch.inference_mode()(_rounds),
                target,
                method,
                temperature,
                requests,
            )
    if device == "cuda":
        yield tried("a forward beside draft steps", torch.inference_mode()(_beside), target)
        yield {"check": "memory", "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def _load(device: str, model: dict[str, Any]) -> Record:
    started = time.perf_counter()
    with torch.device(device):
        stock = LlamaForCausalLM._from_config(LLAMA_8B if device == "cuda" else TOY, dtype=torch.bfloat16)
    made_s = time.perf_counter() - started
    target = model["target"] = Target.of_model(
        stock, "random weights", kv_memory=6 << 30 if device == "cuda" else 4 << 20
    )
    forward = target.forward
    return {
        "exact": target.exact,
        "inexact": target.inexact_reason,
        "forward": type(forward).__name__,
        "captures": Recorded.captures,
        "lean": getattr(forward, "lean", None) is not None,
        "graphs": len(getattr(forward, "recorded", ())),
        "seconds_of_weights": round(made_s, 1),
    }


def _prefill(target: Target, cache: Any, past: int) -> Record:
    """Time the reading of a prompt, twice: the first time graphs are captured on the way."""
    tokens = [(7 + 31 * i) % target.vocab_size for i in range(past)]
    other = target.new_cache(past)
    seconds = []
    for into in (other, cache):
        started = time.perf_counter()
        target.prefill(into, tokens)
        wait(target.device)
        seconds.append(time.perf_counter() - started)
    target.release(other)
    return {"first_s": round(seconds[0], 3), "again_s": round(seconds[1], 3), "tokens_per_s": round(past / seconds[1])}


def _verify(target: Target, cache: Any, sizes: tuple[int, ...]) -> Record:
    """Time verifications of chains, whose rows all read the same slots, and of trees, where a row reads its own
    ancestors.
    """
    chains = {nodes: TokenTree.chain(1, [2] * (nodes - 1), [1.0] * (nodes - 1)) for nodes in sizes}
    trees = {nodes: _bushy(nodes) for nodes in sizes if nodes > 1}
    return {
        "ms": {nodes: _median_ms(partial(target.verify, cache, tree), target) for nodes, tree in chains.items()},
        "trees_ms": {nodes: _median_ms(partial(target.verify, cache, tree), target) for nodes, tree in trees.items()},
    }


def _bushy(nodes: int) -> TokenTree:
    """Return a tree of four children a node, layer by layer."""
    parents = [-1] + [(node - 1) // 4 for node in range(1, nodes)]
    return TokenTree.from_lists([*range(1, nodes + 1)], parents, [1.0] * nodes)


def _breakdown(target: Target, cache: Any) -> Record:
    """Return milliseconds of the kernels of a verification of 64 nodes, the longest first, and of all together."""
    tree = TokenTree.chain(1, [2] * 63, [1.0] * 63)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_REPEATS):
            target.verify(cache, tree)
        wait(target.device)
    kernels = found.key_averages()
    times = {e.key: e.self_device_time_total / 1000 / _REPEATS for e in kernels}
    longest = sorted(times, key=times.__getitem__, reverse=True)[:_KERNELS]
    return {
        "ms": round(sum(times.values()), 3),
        "launches": round(sum(e.count for e in kernels) / _REPEATS),
        "kernels": {name[:60]: round(times[name], 3) for name in longest},
    }


def _rounds(target: Target, method: str, temperature: float, requests: int) -> Record:
    """Return median milliseconds of the parts of a round of `requests` requests."""
    assert target.pool is not None
    for part in (target.pool.keys, target.pool.values):  # memory that was not written yet may hold NaN
        part.zero_()
    device, config = target.device, target.model.config
    head = head_of(method, config, partial(random_weight, device=device.type))
    rounds = Rounds(partial(_timed, device), target, config, head, requests, temperature)
    for _ in range(_WARM_UPS):  # graphs are captured here
        rounds.step()
    steps, done = rounds.head.steps, [rounds.step() for _ in range(_REPEATS)]
    steps = rounds.head.steps - steps
    rounds.close()
    ms = {
        name: round(median(1000 * getattr(parts, name)[0] for parts, _ in done), 2)
        for name in ("draft", "forward", "behind", "read", "told")
    }
    rows = median(rows for _, rows in done)
    return {
        "requests": requests,
        "rows": rows,
        "draft_steps": steps / _REPEATS,
        "ms": ms,
        "captures": Recorded.captures,
    }


def _beside(target: Target) -> Record:
    """Measure the microseconds of the graphs of a forward of 64 rows and of six draft steps, one after the other and on
    two streams at once.
    """
    head: Any = head_of("eagle3", target.model.config, partial(random_weight, device="cuda"))
    rounds = Rounds(partial(_timed, target.device), target, target.model.config, head, 1, 0.0)
    rounds.step()
    forward: Any = target.forward
    verify, step = (
        forward.recorded[64, tuple(rounds.drafter.feature_layers)]._graph,
        head.stack._recorded[16, True]._graph,
    )
    aside = torch.cuda.Stream()

    def in_turns() -> None:
        verify.replay()
        for _ in range(_DRAFT_STEPS):
            step.replay()

    def at_once() -> None:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_DRAFT_STEPS):
                step.replay()
        verify.replay()
        torch.cuda.current_stream().wait_stream(aside)

    found = {
        "in_turns_us": median_us(in_turns),
        "at_once_us": median_us(at_once),
        "forward_us": median_us(verify.replay),
    }
    rounds.close()
    return found


@contextmanager
def _timed(device: torch.device) -> Iterator[list[float]]:
    """Collect the seconds of what runs inside, the wait for the device included."""
    seconds: list[float] = []
    started = time.perf_counter()
    yield seconds
    wait(device)
    seconds.append(time.perf_counter() - started)


def _median_ms(work: Callable[[], Any], target: Target) -> float:
    """Return the median of a call, the host's part included, after two warm-up calls."""
    times = []
    for _ in range(_REPEATS + 2):
        wait(target.device)
        started = time.perf_counter()
        work()
        wait(target.device)
        times.append(1000 * (time.perf_counter() - started))
    return round(median(times[2:]), 2)
