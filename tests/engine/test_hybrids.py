"""Engines on models with layers that have a state: drafts, neighbours, preemption, caches and kills change no text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import Engine
from engine.core.batch import Batch
from engine.core.errors import TalonError
from engine.core.params import SamplingParams
from engine.model.decoder import LeanDecoder
from engine.model.state_pool import ROWS
from engine.model.target import Target
from engine.verifier.request import Request
from tests.engine.test_cache import PROMPT, SAMPLED, WHOLE, answers
from tests.engine.tiny_hybrids import KINDS, save_tiny_hybrid
from tests.faults.test_batching import Asked, alone, random_requests
from tests.faults.test_faults import THREADS
from tests.grids import pairs

REQUESTS = 24
LONGEST = 80_000  # bytes for keys, values and states: little more than one request needs

CODES: dict[str, Any] = {"dtype": "bfloat16", "weights": "q8_0", "verifier.kv_type": "q8_0", "activations": "int8"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function of a kind that saves a model of it once."""
    return cache(lambda kind: save_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), kind))


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, saved: Callable[[str], str]) -> str:
    return saved(request.param)


@pytest.fixture(scope="module")
def delta(saved: Callable[[str], str]) -> str:
    return saved("qwen3.5")


@pytest.fixture(scope="module")
def answered_alone(saved: Callable[[str], str]) -> Callable[[str], tuple[list[Asked], list[list[int]], int]]:
    """Return a function of a kind: requests, half of which begin like others and half of which are sampled, what each
    gets alone, and the bytes of a small pool.
    """

    def answer(kind: str) -> tuple[list[Asked], list[list[int]], int]:
        requests, target = random_requests(random.Random(1), REQUESTS), Target.load(saved(kind))
        return requests, [alone(target, *request) for request in requests], small_pool(target)

    return cache(answer)


def small_pool(target: Target) -> int:
    """Bytes for `LONGEST`, and for the rows that are kept."""
    assert target.pool is not None and target.pool.layer_states is not None
    return LONGEST + ROWS * target.pool.layer_states.shape.row_bytes


def note_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of requests that are preempted from now on."""
    preempted, preempt = list[int](), Request.preempt

    def note(request: Request) -> None:
        preempted.append(request.number)
        preempt(request)

    monkeypatch.setattr(Request, "preempt", note)
    return preempted


@pairs(
    kind=[*KINDS],
    drafts=[("none", "sequential"), *product(["pld", "suffix"], ["sequential", "async"])],
    small=[False, True],
)
async def test_many_requests_get_the_text_that_each_gets_alone(
    saved: Callable[[str], str],
    answered_alone: Callable[[str], tuple[list[Asked], list[list[int]], int]],
    kind: str,
    drafts: tuple[str, str],
    small: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, expected, small_bytes = answered_alone(kind)
    preempted = note_preemptions(monkeypatch)
    method, mode = drafts
    options: dict[str, Any] = {"method": method, "mode": mode, "transport": "inproc", "verifier.cut": False} | THREADS
    options |= {"verifier.kv_memory": small_bytes} if small else {}
    async with await Engine.start({"model": saved(kind)}, **options) as engine:
        results = await asyncio.gather(*(engine.generate(*request) for request in requests))
    assert [result.token_ids for result in results] == expected
    assert bool(preempted) == small


async def test_requests_wait_for_states_and_are_not_preempted_for_want_of_them(
    delta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more blocks than states."""
    requests = [([10 + number] * 8, SamplingParams(max_tokens=7, ignore_eos=True)) for number in range(20)]
    target = Target.load(delta)
    expected = [alone(target, *request) for request in requests]
    preempted = note_preemptions(monkeypatch)
    options: dict[str, Any] = {"verifier.kv_memory": small_pool(target), "transport": "inproc"} | THREADS
    async with await Engine.start({"model": delta}, method="none", **options) as engine:
        results = await asyncio.gather(*(engine.generate(*request) for request in requests))
    assert [result.token_ids for result in results] == expected
    assert not preempted


@pytest.mark.parametrize(("codes", "accepted"), [({}, 2.0), (CODES, 1.3)], ids=["float32", "8 bits"])
async def test_a_draft_model_may_have_a_state_too_and_changes_no_text(
    hybrid: str, codes: dict[str, Any], accepted: float
) -> None:
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    [plain] = await answers(hybrid, None, (PROMPT, sampling), name="none", **codes)
    options: dict[str, Any] = {"drafter.path": hybrid, "drafter.branches": [2, 2, 1], "verifier.cut": False}
    options |= codes | THREADS
    async with await Engine.start({"model": hybrid}, method="sps", transport="inproc", **options) as engine:
        drafted = await engine.generate(PROMPT, sampling)
        assert not codes or (engine.target.activations, engine.target.kv_type) == ("int8", "q8_0")
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.mean_accepted_tokens > accepted


async def test_the_engine_says_what_memory_states_and_a_snapshot_take(delta: str) -> None:
    options: dict[str, Any] = {"verifier.kv_memory": 1 << 20} | THREADS
    async with await Engine.start({"model": delta}, method="none", transport="inproc", **options) as engine:
        told = engine.target
    layers, heads, window = 2, 2 * 16 * 16 * 4, 3 * 64 * 4
    assert told.snapshot_bytes == layers * (heads + window)
    rows = 64 * layers * 320  # what is kept of each, in whole cache lines
    assert told.state_bytes == ((1 << 20) - rows) // 2 // told.snapshot_bytes * told.snapshot_bytes + rows
    assert 1 << 18 < told.kv_bytes <= (1 << 20) - told.state_bytes


async def test_a_forward_that_is_interrupted_ends_the_worker_and_the_next_one_gives_the_same_text(
    delta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [plain] = await answers(delta, None, (PROMPT, SAMPLED), name="none")
    run, calls = LeanDecoder._run, count()

    def interrupted(decoder: LeanDecoder, batch: Batch, out: Tensor) -> Tensor:
        logits = run(decoder, batch, out)
        if len(batch.segments) and batch.segments[0].past == 110 and next(calls) == 0:
            raise MemoryError("no room")
        return logits

    async with await Engine.start({"model": delta}, method="none", transport="inproc", **THREADS) as engine:
        monkeypatch.setattr(LeanDecoder, "_run", interrupted)
        assert (await engine.generate(PROMPT, SAMPLED)).token_ids == plain.token_ids
    assert next(calls) > 1


async def test_a_forward_for_whose_logits_there_is_no_room_ends_its_request_alone(
    delta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [plain] = await answers(delta, None, (PROMPT, SAMPLED), name="none")
    new_out, calls = LeanDecoder._new_out, count()

    def full(decoder: LeanDecoder, batch: Batch, whole: bool) -> Tensor:
        if len(batch.segments) and batch.segments[0].past == 110 and next(calls) == 0:
            raise MemoryError("no room")
        return new_out(decoder, batch, whole)

    async with await Engine.start({"model": delta}, method="none", transport="inproc", **THREADS) as engine:
        monkeypatch.setattr(LeanDecoder, "_new_out", full)
        with pytest.raises(TalonError, match="no room"):
            await engine.generate(PROMPT, SAMPLED)
        assert (await engine.generate(PROMPT, SAMPLED)).token_ids == plain.token_ids


# What prompts begin with.


async def test_a_second_turn_reads_only_what_is_new_and_so_it_does_after_a_restart(hybrid: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"transport": "inproc", "verifier.cache": str(tmp_path)} | THREADS
    async with await Engine.start({"model": hybrid}, method="suffix", **options) as engine:
        first = await engine.generate(PROMPT, SAMPLED)
        turn = [*PROMPT, *first.token_ids, *b"and then?"]
        second = await engine.generate(turn, SAMPLED)
    [plain] = await answers(hybrid, None, (turn, SAMPLED), name="none")
    [restarted] = await answers(hybrid, tmp_path, (turn, SAMPLED))
    assert second.token_ids == restarted.token_ids == plain.token_ids
    read = len(PROMPT) + len(first.token_ids) - 1
    assert second.metrics.cached_tokens == read // 16 * 16 <= restarted.metrics.cached_tokens


async def test_a_snapshot_that_is_not_what_was_written_costs_the_cache_alone(
    delta: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [first] = await answers(delta, tmp_path, (PROMPT, SAMPLED))
    files = [*(tmp_path / "snapshots").iterdir()]
    assert files
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    [again] = await answers(delta, tmp_path, (PROMPT, SAMPLED))
    assert (again.token_ids, again.metrics.cached_tokens) == (first.token_ids, 0)
    assert "ignored" in capfd.readouterr().err
    [third] = await answers(delta, tmp_path, (PROMPT, SAMPLED))
    assert (third.token_ids, third.metrics.cached_tokens) == (first.token_ids, WHOLE)
