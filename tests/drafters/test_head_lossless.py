"""Heads in the loop of a real target: the text is that of plain decoding, whatever the head says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from drafters.heads.checkpoint import TargetWeights
from drafters.heads.growth.policies import Adaptive, Static
from drafters.heads.head import Head
from drafters.heads.head_drafter import HeadDrafter
from engine import Engine
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams
from engine.core.tree import TokenTree
from engine.model.runner import bfloat16_bits
from engine.model.target import Target
from engine.sampling.sampler import Sampler, verify
from tests.drafters.heads.one_pass.test_block import block
from tests.drafters.heads.one_pass.test_spine import spine
from tests.drafters.heads.test_eagle import eagle, eagle3
from tests.drafters.heads.test_medusa import hydra, medusa

DEVICE = "cuda"
PROMPT = [1, 9, 33, 12, 2]
REQUESTS = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=1.0, seed=2)]
HEADS: list[Callable[[Path, TargetWeights], Head]] = [block, spine, eagle, eagle3, medusa, hydra]


@pytest.fixture(scope="module")
def model(target_dir: Path) -> Target:
    return Target.load(str(target_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def plain(target_dir: Path) -> list[list[int]]:
    """What an engine without a drafter answers."""

    async def answer() -> list[list[int]]:
        settings = {"model": str(target_dir), "transport": "inproc", "dtype": "float32", "verifier": {"threads": 1}}
        async with await Engine.start(settings, method="none") as engine:
            return [(await engine.generate(PROMPT, params)).token_ids for params in REQUESTS]

    return asyncio.run(answer())


def decode(model: Target, params: SamplingParams, drafter: HeadDrafter | None = None) -> tuple[list[int], int]:
    """The answer to PROMPT and the rounds it took, drafting and verifying in turns."""
    cache = model.new_cache(256)
    sampler = Sampler(params, PROMPT, [], model.vocab_size)
    layers = drafter.feature_layers if drafter else ()
    logits, features = model.prefill(cache, PROMPT, layers)
    _, answer = verify(TokenTree.root_only(PROMPT[-1]), logits[None], sampler)
    rounds = 0
    if drafter:
        drafter.start(0, PROMPT, params)
        assert features is not None
        drafter.observe(0, Verdict(TokenTree.root_only(PROMPT[-1]), [0], list(answer), bfloat16_bits(features)))
    while sampler.finish_reason is None:
        tree = drafter.propose(0).validate(model.vocab_size) if drafter else TokenTree.root_only(answer[-1])
        logits, features = model.verify(cache, tree, layers)
        path, tokens = verify(tree, logits, sampler)
        cache.commit(path)
        answer += tokens
        rounds += 1
        if drafter:
            assert features is not None
            drafter.observe(0, Verdict(tree, path, tokens, bfloat16_bits(features[path])))
    return answer, rounds


@pytest.mark.parametrize("build", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_of_published_trees_is_that_of_plain_decoding(
    build: Callable[[Path, TargetWeights], Head],
    temperature: float,
    model: Target,
    target: TargetWeights,
    tmp_path: Path,
) -> None:
    """The trees of other policies are those of the engine below."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24)
    plain, _ = decode(model, params)
    assert decode(model, params, HeadDrafter(build(tmp_path, target), Static()))[0] == plain


@pytest.mark.parametrize("build", HEADS)
def test_shared_noise_makes_even_an_untrained_head_agree_with_more_draws(
    build: Callable[[Path, TargetWeights], Head], model: Target, target: TargetWeights, tmp_path: Path
) -> None:
    """At a high temperature the noise decides, and the head knows the noise."""
    params = SamplingParams(temperature=25.0, seed=4, max_tokens=40)
    head = build(tmp_path, target)
    with_noise = decode(model, params, HeadDrafter(head, Adaptive(budget=12, top_k=4)))
    without = decode(model, params, HeadDrafter(head, Adaptive(budget=12, top_k=4), shared_noise=False))
    assert with_noise[0] == without[0]
    assert with_noise[1] < without[1]


async def test_a_prompt_found_in_the_prefix_cache_reaches_the_head_with_all_its_hidden_states(
    target_dir: Path, target: TargetWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden states of a passage that another request has read are the ones that it would have computed itself."""
    passage = [3 + i % 50 for i in range(70)]
    seen: list[NDArray[np.uint16]] = []
    observe = HeadDrafter.observe

    def spy(drafter: HeadDrafter, request: int, verdict: Verdict) -> None:
        if verdict.features is not None and len(verdict.features) > len(passage):
            seen.append(verdict.features)
        observe(drafter, request, verdict)

    monkeypatch.setattr(HeadDrafter, "observe", spy)
    eagle3(tmp_path, target)
    settings = {"model": str(target_dir), "transport": "inproc", "drafter": {"path": str(tmp_path)}}
    settings |= {"method": "eagle3", "dtype": "float32", "verifier": {"threads": 1, "cut": False}}
    found = {}
    for prompts in ([[*passage, 7]], [[*passage, 8], [*passage, 7]]):
        async with await Engine.start(settings) as engine:
            results = [await engine.generate(prompt, SamplingParams(max_tokens=12)) for prompt in prompts]
        found[len(prompts)] = results[-1], seen[-1]
    (alone, whole), (shared, joined) = found[1], found[2]
    assert (alone.metrics.cached_tokens, shared.metrics.cached_tokens) == (0, 64)
    assert alone.token_ids == shared.token_ids
    assert len(whole) == len(passage) + 1 and np.array_equal(whole, joined)


@pytest.mark.parametrize(
    ("build", "merged", "transport", "mode"),
    [
        *((head, False, "inproc", mode) for head in HEADS for mode in ("sequential", "async")),
        *((head, True, "inproc", "auto") for head in HEADS),
        (eagle3, False, "ipc", "async"),
        (block, True, "ipc", "async"),
    ],
)
async def test_a_head_behind_the_engine_changes_no_text(
    build: Callable[[Path, TargetWeights], Head],
    merged: bool,
    transport: str,
    mode: str,
    plain: list[list[int]],
    target_dir: Path,
    target: TargetWeights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.placement.cores", lambda: 4)  # enough for auto to try both
    head = build(tmp_path, target).method
    method = "hybrid" if merged else head
    policy = "dynamic" if mode == "sequential" else "adaptive"
    drafter = {"path": str(tmp_path), "head": head, "growth": {"policy": policy}}
    settings = {"model": str(target_dir), "transport": transport, "mode": mode, "drafter": drafter, "dtype": "float32"}
    settings |= {"verifier": {"threads": 1, "cut": merged}}  # not cut, a head never rests
    async with await Engine.start(settings, method=method) as engine:
        texts = [(await engine.generate(PROMPT, params)).token_ids for params in REQUESTS]
    assert texts == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("build", HEADS)
@pytest.mark.parametrize(("transport", "mode"), [("inproc", "sequential"), ("inproc", "async"), ("ipc", "async")])
async def test_heads_on_a_gpu_change_no_text_of_many_requests(
    build: Callable[[Path, TargetWeights], Head],
    transport: str,
    mode: str,
    target_dir: Path,
    target: TargetWeights,
    tmp_path: Path,
) -> None:
    """Two workers capture graphs meanwhile; more requests at once than sessions are kept for reuse."""
    head = build(tmp_path, target).method
    drafter = {"path": str(tmp_path), "head": head}
    settings = {"model": str(target_dir), "device": DEVICE, "transport": transport, "mode": mode, "drafter": drafter}
    ways = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=2)]
    requests = [([*PROMPT, 5 + i], way) for i in range(20) for way in ways]
    settings |= {"verifier": {"cut": False}}
    texts = {}
    for name in ("none", head):
        async with await Engine.start(settings, method=name) as engine:
            results = await asyncio.gather(*(engine.generate(*request) for request in requests))
        texts[name] = [result.token_ids for result in results]
    assert texts["none"] == texts[head]
