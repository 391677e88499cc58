"""Many requests: nothing is lost and nothing grows."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path

import pytest

from engine import Engine, SamplingParams
from engine.launch import ProcessWorker

REQUESTS, AT_ONCE, SETTLED = 1000, 32, 100


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob("talon-*"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "sps"])
async def test_a_thousand_requests_are_answered_and_memory_stays_flat(
    tiny: str, tiny_draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rng = random.Random(4)
    requests = [
        ([rng.randrange(4, 260) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 20)) for _ in range(REQUESTS)
    ]
    answered = 0
    settled: list[tuple[float, int]] = []
    gate = asyncio.Semaphore(AT_ONCE)
    async with await Engine.start({"model": tiny}, method=method, **{"drafter.path": tiny_draft}) as engine:
        workers = [w.pid for w in engine._workers.running.values() if isinstance(w, ProcessWorker)]
        pids = [os.getpid(), *workers]

        async def ask(prompt: list[int], length: int) -> None:
            nonlocal answered
            async with gate:
                result = await engine.generate(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
            assert len(result.token_ids) == length
            answered += 1
            if answered == SETTLED:
                settled.extend((resident_mb(pid), open_files(pid)) for pid in pids)

        await asyncio.gather(*(ask(*request) for request in requests))
        ended = [(resident_mb(pid), open_files(pid)) for pid in pids]
    assert answered == REQUESTS
    for (memory, files), (memory_then, files_then) in zip(ended, settled, strict=True):
        assert memory - memory_then < 0.05 * memory_then, (settled, ended)
        assert files <= files_then + 2, (settled, ended)
    assert not any(is_running(pid) for pid in workers)
    assert not leftovers(tmp_path)
    print(f"{method}: resident MB after {SETTLED} {settled}, after {REQUESTS} {ended}")
