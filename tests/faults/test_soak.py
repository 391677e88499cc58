"""Mixed load for a long time (`make soak MINUTES=30`): eight clients, cancelled requests, workers killed at random, and
cache folders whose files are copied and damaged meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import Engine, SamplingParams
from tests.faults.cache_damage import CacheDamage
from tests.faults.test_batching import Asked, random_requests
from tests.faults.test_faults import pid_of

CLIENTS, SAMPLE_S = 8, 5.0
MARKS = 300, 1000, 3000  # answers after which memory is printed
GROWTH = 1.1  # of a role's memory from the first third of the run to the last: a worker's depends on its age


class Soak:
    """What happens to one engine. memory: role -> MB at each sample. caches: its cache folders, which are damaged.
    A verifier that finds the model's proof damaged imports transformers, and is larger for it: a role of its own.
    """

    def __init__(
        self, engine: Engine, requests: list[Asked], expected: list[list[int]], minutes: float, caches: list[Path]
    ):
        self.engine, self.requests, self.expected = engine, requests, expected
        self.damage = CacheDamage(caches, random.Random(-2))
        self.marks = iter((*MARKS, math.inf))
        self.ends_s = time.monotonic() + 60 * minutes
        self.counts: Counter[str] = Counter()
        self.memory: dict[str, list[float]] = defaultdict(list)
        self.workers: set[psutil.Process] = set()  # a process, since in two hours its number may be given again

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self.client(random.Random(number)))
            group.create_task(self.kill(random.Random(-1)))
            group.create_task(self.damage_caches(random.Random(-3)))
            group.create_task(self.watch())

    def goes_on(self) -> bool:
        return time.monotonic() < self.ends_s

    async def client(self, rng: random.Random) -> None:
        while self.goes_on():
            number = rng.randrange(len(self.requests))
            task = asyncio.create_task(self.engine.generate(*self.requests[number]))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.uniform(0, 1))
                task.cancel()
            try:
                result = await task
                assert result.token_ids == self.expected[number]
                self.counts["answered"] += 1
                self.counts["cached tokens"] += result.metrics.cached_tokens
            except asyncio.CancelledError:
                self.counts["cancelled"] += 1

    async def kill(self, rng: random.Random) -> None:
        while self.goes_on():
            await asyncio.sleep(rng.uniform(2, 12))
            role = "verifier" if rng.random() < 0.1 else "drafter"
            if self.engine._ready[role].is_set():
                os.kill(pid_of(self.engine, role), signal.SIGKILL)
                self.counts[f"{role} killed"] += 1

    async def damage_caches(self, rng: random.Random) -> None:
        while self.goes_on():
            await asyncio.sleep(rng.uniform(5, 40))
            await asyncio.to_thread(self.damage.strike)

    async def watch(self) -> None:
        started_s, mark = time.monotonic(), next(self.marks)
        while self.goes_on():
            await asyncio.sleep(SAMPLE_S)
            pids = {"front end": os.getpid()}
            pids |= {role: pid_of(self.engine, role) for role in list(self.engine._workers.running)}
            for role, pid in pids.items():
                if role == "front end" or self.engine._ready[role].is_set():
                    with contextlib.suppress(FileNotFoundError):  # killed just now
                        if (size := resident_mb(pid)) > 0:
                            self.memory[f"{role} with transformers" if imports_transformers(pid) else role].append(size)
            for pid in set(pids.values()) - {os.getpid()}:
                self.note_worker(pid)
            now = ", ".join(f"{role} {sizes[-1]:.0f} MB" for role, sizes in self.memory.items() if sizes)
            counts = dict(self.counts + self.damage.counts)
            print(f"{time.monotonic() - started_s:.0f} s: {counts}; {now}", flush=True)
            if self.counts["answered"] >= mark:
                medians = {role: round(statistics.median(sizes[-12:])) for role, sizes in self.memory.items() if sizes}
                print(f"memory at {mark:,} answers, medians of the last minute in MB: {medians}", flush=True)
                mark = next(self.marks)

    def note_worker(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # killed just now
            self.workers.add(psutil.Process(pid))


def imports_transformers(pid: int) -> bool:
    """Whether a worker has imported what reads stock models."""
    return pid != os.getpid() and "safetensors" in Path(f"/proc/{pid}/maps").read_text()


MINUTES = float(os.environ.get("TALON_SOAK_MINUTES", "1"))


@pytest.mark.slow
async def test_mixed_load_leaves_memory_flat_and_nothing_behind(
    tiny: str, tiny_draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await mix(tiny, tmp_path, {"method": "sps", "mode": "async", "drafter.path": tiny_draft}, [])


@pytest.mark.slow
async def test_mixed_load_of_the_real_model_leaves_memory_flat_and_nothing_behind(
    smollm2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TALON_HOME", str(tmp_path / "home"))  # its files are damaged
    shutil.copytree(smollm2, tmp_path / "home" / "gguf" / "smollm2-135m")
    options = {"method": "suffix", "mode": "async", "verifier.kv_memory": 64 << 20, "verifier.threads": 1}
    await mix("smollm2-135m", tmp_path, options, [tmp_path / "home"])


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob("talon-*"))


def long_requests(rng: random.Random, count: int, length: int) -> list[Asked]:
    """Prompts that begin alike and are kept in the cache of prompts."""
    begin = rng.choices(range(4, 260), k=150)
    return [
        (
            [*begin[: rng.randrange(150)], *rng.choices(range(4, 260), k=60)],
            SamplingParams(max_tokens=length, seed=number),
        )
        for number in range(count)
    ]


async def mix(model: str, folder: Path, options: dict[str, Any], homes: list[Path]) -> None:
    """Serve the mixed load; afterwards there is no process, no socket, no file, and memory has not grown. homes: cache
    folders of models.
    """
    requests = [*random_requests(random.Random(8), 40, 60), *long_requests(random.Random(9), 20, 20)]
    cache = folder / "cache"
    options = options | {"verifier.cache": str(cache), "verifier.cache_gb": 0.1}
    async with await Engine.start({"model": model}, method="none") as engine:
        expected = [(await engine.generate(*request)).token_ids for request in requests]
    files = open_files(os.getpid())
    async with await Engine.start({"model": model}, **options) as engine:
        soak = Soak(engine, requests, expected, MINUTES, [cache, *homes])
        await soak.run()
        for role in engine._workers.running:
            soak.note_worker(pid_of(engine, role))
        assert not engine._inflight
    assert soak.counts["answered"] and soak.counts["cancelled"] and soak.counts["drafter killed"]
    assert soak.damage.counts["files damaged"] and soak.counts["cached tokens"]
    assert soak.workers and not any(worker.is_running() for worker in soak.workers)
    assert not leftovers(folder)
    assert open_files(os.getpid()) <= files
    for role, sizes in soak.memory.items():
        third = max(1, len(sizes) // 3)
        early, late = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
        print(f"{role}: {early:.0f} MB in the first third, {late:.0f} MB in the last")
        assert late < GROWTH * early, (role, sizes)
