"""The drafter is killed once during each of fifty requests: every text is that of plain decoding, none is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time

import pytest

from engine import Engine, SamplingParams
from tests.faults.test_faults import _own_temporary_folder, pid_of, replaced

__all__ = ["_own_temporary_folder"]

KILLS, LENGTH = 50, 100

Request = tuple[list[int], SamplingParams]


def random_requests(rng: random.Random, count: int, length: int) -> list[Request]:
    """Prompts of random tokens; half of them greedy, half sampled."""
    requests = []
    for number in range(count):
        prompt = [rng.randrange(4, 260) for _ in range(rng.randrange(1, 40))]
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=float(number % 2), seed=number)
        requests.append((prompt, sampling))
    return requests


async def plain_texts(model: str, requests: list[Request]) -> tuple[list[list[int]], float]:
    """What plain decoding answers, and its seconds for a request."""
    async with await Engine.start({"model": model}, method="none") as engine:
        started_s = time.monotonic()
        texts = [(await engine.generate(*request)).token_ids for request in requests]
        return texts, (time.monotonic() - started_s) / len(requests)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "mode"), [("suffix", "async"), ("sps", "sequential"), ("sps", "async")])
async def test_fifty_kills_during_fifty_requests_change_no_text(
    tiny: str, tiny_draft: str, method: str, mode: str
) -> None:
    rng = random.Random(50)
    requests = random_requests(rng, KILLS, LENGTH)
    expected, typical_s = await plain_texts(tiny, requests)
    back_s = []
    options = {"method": method, "mode": mode, "drafter.path": tiny_draft}
    async with await Engine.start({"model": tiny}, **options) as engine:
        for request, text in zip(requests, expected, strict=True):
            task = asyncio.create_task(engine.generate(*request))
            await asyncio.sleep(rng.uniform(0, typical_s))
            first = pid_of(engine, "drafter")
            os.kill(first, signal.SIGKILL)
            killed_s = time.monotonic()
            await replaced(engine, "drafter", first)
            back_s.append(time.monotonic() - killed_s)
            assert (await task).token_ids == text
    median, worst = statistics.median(back_s), max(back_s)
    print(f"{method} {mode}: {KILLS} kills, texts unchanged; drafter back after {median:.2f} s, at worst {worst:.2f} s")
