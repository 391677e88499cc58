"""Many requests in one forward: neighbours, full pools, cancels and dead workers change no text and lose no request."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from engine import Engine, SamplingParams
from engine.core.batch import Segment
from engine.core.errors import NotANumber, RequestError, RequestFailed, WorkerDied
from engine.core.tree import TokenTree
from engine.frontend import supervisor
from engine.install_paths import ROOT
from engine.model.target import Target
from engine.sampling.sampler import Sampler
from engine.verifier.request import Request
from tests.engine.weights.tiny_gguf import WEIGHTS
from tests.faults.test_faults import PROMPT, THREADS, _own_temporary_folder, pid_of, until

__all__ = ["_own_temporary_folder"]

REQUESTS, LENGTH = 300, 24
POOL_BLOCKS = 16  # hardly more than the longest request needs
POISON = 259

Asked = tuple[list[int], SamplingParams]


def alone(target: Target, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """What plain decoding answers, one forward for each token, with a cache of its own."""
    sampler = Sampler(sampling, prompt, target.eos_tokens, target.vocab_size)
    cache = target.new_cache(len(prompt) + sampling.max_tokens)
    logits, _ = target.prefill(cache, prompt)
    answer = [sampler.draw(sampler.choices(logits[None])[0])]
    while sampler.finish_reason is None:
        rows, _ = target.verify(cache, TokenTree.root_only(answer[-1]))
        cache.commit([0])
        answer.append(sampler.draw(sampler.choices(rows)[0]))
    target.release(cache)
    return answer


def block_bytes(target: Target) -> int:
    """What a block of keys and values takes, in the type that this processor multiplies fastest."""
    assert target.pool is not None
    return target.pool.shape.block_bytes


def random_requests(rng: random.Random, count: int, length: int = LENGTH) -> list[Asked]:
    """Half of the prompts begin like others; half are greedy, half sampled."""
    passages = [[rng.randrange(4, 256) for _ in range(rng.randrange(30, 100))] for _ in range(5)]
    requests = []
    for number in range(count):
        passage = rng.choice(passages)
        start = passage[: rng.randrange(16, len(passage))] if number % 4 < 2 else []
        prompt = start + [rng.randrange(4, 256) for _ in range(rng.randrange(1, 30))]
        if number % 10 == 9:
            prompt = prompt[:1] * 20 + prompt  # something for drafters to copy
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, length + 1), temperature=float(number % 2), seed=number, ignore_eos=True
        )
        requests.append((prompt, sampling))
    return requests


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Segment]]]:
    """The segments of every forward of the verifier, whose worker is a thread, that take part in a request's life."""
    forwards: list[list[Segment]] = []
    run = Target.run

    def noted(target: Target, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> Any:
        forwards.append(list(segments))
        return run(target, segments, feature_layers)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "run", noted)
        yield forwards


def read_rows(forwards: list[list[Segment]]) -> int:
    """How many tokens of prompts were computed."""
    return sum(len(segment) for segments in forwards for segment in segments if segment.tree is None)


@pytest.mark.parametrize("method", ["none", "suffix"])
async def test_three_hundred_requests_each_get_the_text_that_they_get_alone(
    tiny: str, method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    await ask_three_hundred(tiny, method, 0.2, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "suffix", "hybrid"])
async def test_three_hundred_requests_of_the_real_model_each_get_the_text_that_they_get_alone(
    smollm2: str, method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    heads = {"drafter.head": "block", "drafter.path": str(ROOT / "models" / "smollm2-135m" / "block")}
    await ask_three_hundred(smollm2, method, 20.0, monkeypatch, capfd, **(heads if method == "hybrid" else {}))


@cache
def three_hundred_alone(model: str) -> tuple[list[Asked], list[list[int]], int]:
    """Return requests, what each of them gets alone, and the bytes of a pool that is too small for them."""
    requests, target = random_requests(random.Random(300), REQUESTS), Target.load(model)
    return requests, [alone(target, *request) for request in requests], POOL_BLOCKS * block_bytes(target)


async def ask_three_hundred(
    model: str,
    method: str,
    span_s: float,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    **drafter: str,
) -> None:
    """They arrive within `span_s` and share a pool that is too small for them; a fifth of them are cancelled."""
    rng = random.Random(301)
    requests, expected, small = three_hundred_alone(model)
    preempted: list[int] = []
    preempt = Request.preempt
    monkeypatch.setattr(Request, "preempt", lambda request: (preempted.append(request.number), preempt(request))[1])
    options = (
        THREADS | {"verifier.kv_memory": small, "verifier.max_running": 16, "verifier.prefill_chunk": 64} | drafter
    )
    answered = cancelled = 0
    async with await Engine.start({"model": model}, method=method, transport="inproc", **options) as engine:

        async def ask(number: int, arrival_s: float, patience_s: float | None) -> None:
            nonlocal answered, cancelled
            await asyncio.sleep(arrival_s)
            try:
                result = await asyncio.wait_for(engine.generate(*requests[number]), patience_s)
            except asyncio.TimeoutError:
                cancelled += 1
            else:
                answered += 1
                assert result.token_ids == expected[number], number

        arrivals = [rng.uniform(0, span_s) for _ in requests]
        patience = [rng.uniform(0, 0.6 * span_s) if rng.random() < 0.2 else None for _ in requests]
        await asyncio.gather(*map(ask, range(REQUESTS), arrivals, patience))
        assert not engine._inflight
    assert answered + cancelled == REQUESTS and cancelled
    assert len(preempted) > 5
    assert "starting another" not in capfd.readouterr().err
    print(f"{method}: {answered} answered, {cancelled} cancelled, {len(preempted)} preemptions")


async def test_a_request_that_fits_with_plain_decoding_fits_with_drafts(
    tiny: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A tree may not decide whether a request has room. One that never fits is refused at once."""
    prompt = [7, 8, 9] * 20
    sampling = SamplingParams(max_tokens=11 * 16 - len(prompt), ignore_eos=True)
    target = Target.load(tiny)
    expected = alone(target, prompt, sampling)
    options = THREADS | {"verifier.kv_memory": 11 * block_bytes(target), "verifier.cut": False}
    async with await Engine.start({"model": tiny}, method="suffix", transport="inproc", **options) as engine:
        assert (await engine.generate(prompt, sampling)).token_ids == expected
        assert "verifier.kv_memory has room for 176 of the context's" in capfd.readouterr().err
        with pytest.raises(RequestError, match=r"leave no room for an answer: .* maximum context length is 176"):
            await engine.generate([5] * 200, sampling)
        assert (await engine.generate(prompt, sampling)).token_ids == expected


def delete(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def overwrite(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"this was a model" * 100)


@pytest.mark.parametrize(("ruin", "tries"), [(delete, supervisor._TRIES), (overwrite, 1)])
async def test_without_usable_weights_a_dead_verifier_fails_every_request_with_the_reason(
    tiny: str, tmp_path: Path, ruin: Callable[[Path], None], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_TRIES", tries)
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    sampling = SamplingParams(max_tokens=450, ignore_eos=True)
    slow = {"verifier.simulated_latency_ms": 20}  # or they are answered before the verifier is dead
    async with await Engine.start({"model": str(model)}, method="none", **THREADS, **slow) as engine:
        tasks = [asyncio.create_task(engine.generate([10 + i], sampling)) for i in range(4)]
        await until(lambda: len(engine._inflight) == 4)
        ruin(model)
        os.kill(pid_of(engine, "verifier"), signal.SIGKILL)
        later = asyncio.create_task(engine.generate([3], sampling))
        for outcome in await asyncio.wait_for(asyncio.gather(*tasks, later, return_exceptions=True), 400):
            assert isinstance(outcome, WorkerDied) and f"model={model}" in str(outcome), outcome
        with pytest.raises(WorkerDied, match="cannot be started again: model="):
            await asyncio.wait_for(engine.generate([4], sampling), 5)


async def test_a_start_from_a_cache_that_had_to_be_mended_hardly_counts(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    async with await Engine.start({"model": str(model)}, method="none", **THREADS) as engine:
        expected = (await engine.generate([10, 11], sampling)).token_ids
        damaged = iter([True])

        def mend() -> bool:
            """Say that the model was mended. Before the first start it is damaged again at once."""
            if next(damaged, None) is None:
                shutil.copy(Path(tiny) / WEIGHTS, model)
            return True

        monkeypatch.setattr(supervisor, "_TRIES", 1)
        monkeypatch.setattr(engine._supervisor, "_restore", mend)
        delete(model)
        os.kill(pid_of(engine, "verifier"), signal.SIGKILL)
        answer = await asyncio.wait_for(engine.generate([10, 11], sampling), 400)
        assert answer.token_ids == expected


async def test_without_a_usable_index_a_dead_drafter_is_reported_and_answers_go_on(
    tiny: str, tiny_draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_TRIES", 1)
    index = Path(shutil.copytree(Path(tiny_draft) / "datastore", tmp_path / "index"))
    prompt, sampling = [10, 11, 12], SamplingParams(max_tokens=300, ignore_eos=True)
    expected = alone(Target.load(tiny), prompt, sampling)
    options = THREADS | {"method": "datastore", "mode": "async", "drafter.datastore": str(index)}
    async with await Engine.start({"model": tiny}, **options) as engine:
        task = asyncio.create_task(engine.generate(prompt, sampling))
        shutil.rmtree(index)
        os.kill(pid_of(engine, "drafter"), signal.SIGKILL)
        assert (await asyncio.wait_for(task, 60)).token_ids == expected
        said = ""

        def has_given_up() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "answers go on without drafts" in said

        await until(has_given_up, 120)
        assert f"the drafter cannot be started again: drafter.datastore={index}" in said
        assert (await asyncio.wait_for(engine.generate(prompt, sampling), 60)).token_ids == expected


@pytest.mark.parametrize("part", ["prompt", "answer"])
async def test_a_request_whose_forward_fails_ends_alone(
    tiny: str, part: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = random_requests(random.Random(4), 12)
    target = Target.load(tiny)
    expected = [alone(target, *request) for request in requests]
    run = Target.run
    poisoned: list[Any] = []

    def failing(target: Target, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> Any:
        for segment in segments:
            if POISON in segment.tokens and segment.tree is None:
                poisoned.append(segment.cache)
            mine = any(segment.cache is cache for cache in poisoned)
            if mine and (part == "prompt" or segment.tree is not None):
                raise RuntimeError("the kernel has failed")
        return run(target, segments, feature_layers)

    monkeypatch.setattr(Target, "run", failing)
    async with await Engine.start({"model": tiny}, method="suffix", transport="inproc", **THREADS) as engine:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        bad = asyncio.create_task(engine.generate([5, POISON, 6], SamplingParams(max_tokens=20, ignore_eos=True)))
        with pytest.raises(RequestFailed, match="the kernel has failed"):
            await asyncio.wait_for(bad, 60)
        assert [(await task).token_ids for task in tasks] == expected
    assert "starting another" not in capfd.readouterr().err


async def test_a_long_prompt_is_read_in_chunks_that_ride_along_with_those_who_decode(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = [i % 200 + 4 for i in range(400)], SamplingParams(max_tokens=4, ignore_eos=True)
    decoding = SamplingParams(max_tokens=480, ignore_eos=True)
    with watched(monkeypatch) as forwards:
        options = THREADS | {"transport": "inproc", "verifier.prefill_chunk": 40, "verifier.simulated_latency_ms": 10}
        async with await Engine.start({"model": tiny}, method="none", **options) as engine:
            forwards.clear()
            tasks = [asyncio.create_task(engine.generate([10 + i], decoding)) for i in range(4)]
            await until(lambda: any(sum(s.tree is not None for s in segments) == 4 for segments in forwards[-1:]))
            before = len(forwards)
            await asyncio.wait_for(engine.generate(long, short), 60)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    with_chunks = [segments for segments in forwards[before:] if any(s.tree is None for s in segments)]
    assert sum(len(s) for segments in with_chunks for s in segments if s.tree is None) == len(long)
    assert len(with_chunks) >= 10
    for segments in with_chunks:
        assert sum(s.tree is not None for s in segments) == 4  # nobody who decodes is left out
        assert sum(len(s) for s in segments if s.tree is None) <= 40


async def test_eight_requests_over_one_passage_have_it_computed_once(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passage = [i * 7 % 251 + 4 for i in range(320)]
    prompts = [[*passage, 10 + i, 20 + i, 30 + i] for i in range(8)]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    target = Target.load(tiny)
    expected = [alone(target, prompt, sampling) for prompt in prompts]
    with watched(monkeypatch) as forwards:
        async with await Engine.start({"model": tiny}, method="none", transport="inproc", **THREADS) as engine:
            forwards.clear()
            results = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
            assert [result.token_ids for result in results] == expected
            assert read_rows(forwards) == len(passage) + 8 * 3
            forwards.clear()
            again = await engine.generate(prompts[3], sampling)
            assert again.token_ids == expected[3]
            assert read_rows(forwards) <= 16 + 3  # all but the block that its answer began in


async def test_a_request_that_ends_every_verifier_is_given_up_after_five_and_no_other_is_lost(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = random_requests(random.Random(7), 5)
    target = Target.load(tiny)
    expected = [alone(target, *request) for request in requests]
    run = Target.run

    def deadly(target: Target, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> Any:
        if any(POISON in segment.tokens for segment in segments if segment.tree is None):  # in a prompt
            raise SystemExit  # ends the worker, as an abort in a library would
        return run(target, segments, feature_layers)

    monkeypatch.setattr(Target, "run", deadly)
    monkeypatch.setattr("engine.frontend.processes._BACK_OFF_S", (0.0,))
    async with await Engine.start({"model": tiny}, method="none", transport="inproc", **THREADS) as engine:
        for poisoned in (1, 2):
            tasks = [asyncio.create_task(engine.generate(*request)) for request in requests[:3]]
            bad = [asyncio.create_task(engine.generate([5, POISON])) for _ in range(poisoned)]
            tasks += [asyncio.create_task(engine.generate(*request)) for request in requests[3:]]
            for task in bad:
                with pytest.raises(WorkerDied, match=r"5 verifiers in a row died with this request before it had a to"):
                    await asyncio.wait_for(task, 120)
            texts = [(await asyncio.wait_for(task, 60)).token_ids for task in tasks]
            assert texts == expected
            await until(lambda: engine.ready)  # the last one that died is replaced behind its request's error
            died = capfd.readouterr().err.count("talon: the verifier died; starting another")
            # Two with all of them, unless one arrived late, and three with each suspect alone.
            assert 2 + 3 * poisoned <= died <= 5 * poisoned


async def decoded(engine: Engine, sampling: SamplingParams) -> tuple[list[int], str, str]:
    """Return the tokens of an answer and its text, and how it ended: the reason or the error."""
    tokens, text, stream = list[int](), "", engine.stream(PROMPT, sampling)
    try:
        async with stream:
            async for piece in stream:
                tokens, text = [*tokens, *piece.token_ids], text + piece.text
    except NotANumber as error:
        return tokens, text, str(error)
    assert stream.result is not None
    return tokens, text, str(stream.result.finish_reason)


async def test_drafts_change_neither_the_tokens_before_logits_that_are_no_numbers_nor_how_the_answer_ends(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer ends with an error, or by a stop text that the last token before them completes. The drafter is the
    model itself, so all drafts are right.
    """
    run, broken = Target.run, 0
    cut, stops = list[int](), list[tuple[list[int], str, str]]()

    def overflowing(target: Target, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> Any:
        logits, features = run(target, segments, feature_layers)
        if threading.current_thread().name.startswith("drafter"):
            return logits, features
        logits, first = logits.clone(), 0
        for segment in segments:
            if segment.tree is not None:
                rows = np.flatnonzero(segment.past + segment.tree.depths == broken)
                logits[first + rows, 7] = torch.nan
                cut.extend(rows[rows > 0])
            first += segment.wanted_rows
        return logits, features

    options = THREADS | {"transport": "inproc", "mode": "async", "verifier.cut": False}
    drafts = {"method": "sps", "drafter.path": tiny, "verifier.simulated_latency_ms": 5}
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    async with (
        await Engine.start({"model": tiny}, method="none", **options) as plain,
        await Engine.start({"model": tiny}, **options, **drafts) as drafted,
    ):
        monkeypatch.setattr(Target, "run", overflowing)
        before = ""
        for broken in range(56, 72):
            tokens, text, error = await decoded(plain, sampling)
            assert f"at position {broken + 1}" in error and len(tokens) == broken + 1 - len(PROMPT)
            assert await decoded(drafted, sampling) == (tokens, text, error)
            if len(text) > len(before) > 0:
                stopped = structs.replace(sampling, stop=(text[-2:],))
                stops.append(await decoded(plain, stopped))
                assert await decoded(drafted, stopped) == stops[-1]
            before = text
    assert cut and sum(end == "stop" for *_, end in stops) > 2


async def test_logits_that_are_no_numbers_end_their_own_request_with_its_own_error(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(random.Random(5), 6)
    target = Target.load(tiny)
    expected = [alone(target, *request) for request in requests]
    run = Target.run
    poisoned: list[Any] = []

    def overflowing(target: Target, segments: Sequence[Segment], feature_layers: Sequence[int] = ()) -> Any:
        logits, features = run(target, segments, feature_layers)
        logits = logits.clone()  # those of inference mode cannot be written
        first = 0
        for segment in segments:
            if POISON in segment.tokens and segment.tree is None:  # in a prompt; others may draw or draft it
                poisoned.append(segment.cache)
            rows = {"all": len(segment), "last": 1, "none": 0}[segment.wanted]
            if any(segment.cache is cache for cache in poisoned):
                logits[first : first + rows, 7] = torch.nan
            first += rows
        return logits, features

    monkeypatch.setattr(Target, "run", overflowing)
    async with await Engine.start({"model": tiny}, method="suffix", transport="inproc", **THREADS) as engine:
        tasks = [asyncio.create_task(engine.generate(*request)) for request in requests]
        for temperature in (0.0, 1.0):
            with pytest.raises(NotANumber, match=r"logits are not numbers \(NaN\) at position 3"):
                sampling = SamplingParams(max_tokens=20, temperature=temperature)
                await asyncio.wait_for(engine.generate([5, POISON, 6], sampling), 60)
        assert [(await task).token_ids for task in tasks] == expected
