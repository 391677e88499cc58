"""Verifiers are killed while eight clients stream: no request is lost, no text changes, and they come back soon.

`pytest -m slow -s tests/faults/test_verifier_kills.py`; TALON_KILLS=5 for a short run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from engine import Engine
from engine.model.target import Target
from tests.engine.tiny_hybrids import KINDS, save_tiny_hybrid
from tests.faults.test_batching import THREADS, Asked, alone, random_requests
from tests.faults.test_faults import _own_temporary_folder, is_running, pid_of, replaced, until

__all__ = ["_own_temporary_folder"]

CLIENTS, LENGTH = 8, 60
OPTIONS: dict[str, Any] = {"method": "suffix"} | THREADS
KILLS = int(os.environ.get("TALON_KILLS", "50"))
STARTS = 3  # whose median is the time that loading takes
SOON_S = 1.0  # beyond loading


class Killing:
    """One engine whose verifiers are killed. expected: each request's text alone. back_s: from a kill until another
    verifier serves.
    """

    def __init__(self, engine: Engine, requests: list[Asked], expected: list[list[int]]):
        self.engine, self.requests, self.expected = engine, requests, expected
        self.counts: Counter[str] = Counter()
        self.back_s: list[float] = []
        self.pids: set[int] = set()
        self.done = False

    async def run(self, kills: int, latest_s: float) -> None:
        """latest_s: how long after an answer, at the latest, the next kill waits for requests under way."""
        rng = random.Random(kills)
        clients = [asyncio.create_task(self.client(random.Random(number))) for number in range(CLIENTS)]
        try:
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0, latest_s))
                await self.kill()
                before = self.counts["answered"]
                await until(lambda before=before: self.counts["answered"] > before, 120)
        finally:
            self.done = True
        await asyncio.wait_for(asyncio.gather(*clients), 120)

    async def client(self, rng: random.Random) -> None:
        """What a stream has given stays, and it goes on behind that."""
        while not self.done:
            number = rng.randrange(len(self.requests))
            expected, tokens = self.expected[number], []
            self.counts["asked"] += 1
            async with self.engine.stream(*self.requests[number]) as stream:
                async for piece in stream:
                    tokens += piece.token_ids
                    assert tokens == expected[: len(tokens)]
            assert tokens == expected
            self.counts["answered"] += 1

    async def kill(self) -> None:
        """Kills the verifier while at least half of the clients have a request under way."""
        await until(lambda: len(self.engine._inflight) >= CLIENTS / 2, 120)
        self.counts["under way when killed"] += len(self.engine._inflight)
        self.pids |= {pid_of(self.engine, role) for role in self.engine._workers.running}
        os.kill(first := pid_of(self.engine, "verifier"), signal.SIGKILL)
        killed_s = time.monotonic()
        await replaced(self.engine, "verifier", first)
        self.back_s.append(time.monotonic() - killed_s)
        print(f"kill {len(self.back_s)}: back after {self.back_s[-1]:.2f} s, {dict(self.counts)}", flush=True)


async def kill_under_load(model: str, kills: int, latest_s: float) -> list[float]:
    """Returns the seconds from each kill until a verifier served."""
    requests = [
        (prompt, msgspec.structs.replace(sampling, max_tokens=LENGTH))
        for prompt, sampling in random_requests(random.Random(kills), 24)
    ]
    target = Target.load(model)
    expected = [alone(target, *request) for request in requests]
    del target
    async with await Engine.start({"model": model}, **OPTIONS) as engine:
        killing = Killing(engine, requests, expected)
        await killing.run(kills, latest_s)
        assert not engine._inflight
        killing.pids |= {pid_of(engine, role) for role in engine._workers.running}
    assert killing.counts["asked"] == killing.counts["answered"]
    assert killing.counts["under way when killed"] >= kills * CLIENTS / 2
    assert not any(is_running(pid) for pid in killing.pids)
    back_s = sorted(killing.back_s)
    print(
        f"{kills} kills, {dict(killing.counts)}, every text unchanged; back after {statistics.median(back_s):.2f} s, "
        f"nine in ten within {back_s[int(0.9 * len(back_s))]:.2f}, at worst {back_s[-1]:.2f}"
    )
    return back_s


async def test_verifiers_killed_under_load_lose_no_request_and_change_no_text(tiny: str) -> None:
    await kill_under_load(tiny, 2, 1.0)


OF_A_KIND = [pytest.param(kind, marks=[pytest.mark.slow] * (number > 0)) for number, kind in enumerate(KINDS)]


@pytest.mark.parametrize("kind", OF_A_KIND)
async def test_verifiers_killed_under_load_lose_no_state(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    await kill_under_load(save_tiny_hybrid(tmp_path_factory.mktemp("hybrid"), kind), 1, 1.0)


@pytest.mark.slow
async def test_fifty_verifiers_killed_under_load_lose_no_request_and_change_no_text(tiny: str) -> None:
    await kill_under_load(tiny, KILLS, 1.0)


@pytest.mark.slow
async def test_verifiers_of_the_real_model_are_back_in_the_time_of_loading_and_a_second(smollm2: str) -> None:
    starts_s = []
    for _ in range(STARTS):
        started_s = time.monotonic()
        async with await Engine.start({"model": smollm2}, **OPTIONS):
            starts_s.append(time.monotonic() - started_s)
    print(f"loading takes {statistics.median(starts_s):.2f} s ({min(starts_s):.2f} to {max(starts_s):.2f})")
    back_s = await kill_under_load(smollm2, KILLS, 4.0)
    assert statistics.median(back_s) <= statistics.median(starts_s) + SOON_S
