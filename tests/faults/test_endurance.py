"""Many requests: nothing is lost and nothing grows."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from engine import Engine, SamplingParams
from engine.frontend.processes import ProcessWorker
from engine.frontend.tasks import keep_under_way

REQUESTS, AT_ONCE, SETTLED = 1000, 32, 100
POOL = 2 << 20  # what finished requests have read stays known until the pool is full: that grows, and no further


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
    options = {"drafter.path": tiny_draft, "verifier.kv_memory": POOL, "verifier.threads": 1}
    async with await Engine.start({"model": tiny}, method=method, **options) as engine:
        workers = [w.pid for w in engine._workers.running.values() if isinstance(w, ProcessWorker)]
        pids = [os.getpid(), *workers]

        async def ask(request: tuple[list[int], int]) -> None:
            prompt, length = request
            nonlocal answered
            result = await engine.generate(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
            assert len(result.token_ids) == length
            answered += 1
            if answered == SETTLED:
                settled.extend((resident_mb(pid), open_files(pid)) for pid in pids)

        await keep_under_way(AT_ONCE, requests, ask)
        ended = [(resident_mb(pid), open_files(pid)) for pid in pids]
    assert answered == REQUESTS
    for (memory, files), (memory_then, files_then) in zip(ended, settled, strict=True):
        assert memory - memory_then < 0.05 * memory_then, (settled, ended)
        assert files <= files_then + 2, (settled, ended)
    assert not any(is_running(pid) for pid in workers)
    assert not leftovers(tmp_path)
    print(f"{method}: resident MB after {SETTLED} {settled}, after {REQUESTS} {ended}")


@pytest.mark.slow
async def test_the_verifier_of_the_real_model_grows_by_its_pool_and_no_more(smollm2: str) -> None:
    """After 200 requests it has grown by what they leave in the pool, which is bounded, and by buffers that the first
    ones make.
    """
    rng = random.Random(9)
    options = {"verifier.kv_memory": 32 << 20, "verifier.threads": 1}
    resident: list[float] = []
    async with await Engine.start({"model": smollm2}, method="pld", **options) as engine:
        worker = engine._workers.running["verifier"]
        assert isinstance(worker, ProcessWorker)
        for number in range(200):
            prompt = [rng.randrange(1000, 40000) for _ in range(rng.randrange(10, 80))]
            await engine.generate(prompt, SamplingParams(max_tokens=rng.randrange(4, 16), ignore_eos=True))
            if number % 20 == 0:
                resident.append(resident_mb(worker.pid))
    print(f"resident MB after every 20 requests: {[round(mb) for mb in resident]}")
    assert resident[-1] - resident[0] < 32 + 32
    assert resident[-1] - resident[5] < 8


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_four_thousand_tokens_of_the_real_model_are_those_of_plain_decoding(
    smollm2: str, temperature: float
) -> None:
    prompt = "Write a very long story about a lighthouse keeper."
    sampling = SamplingParams(max_tokens=4000, temperature=temperature, seed=3, ignore_eos=True)
    texts = []
    for method in ("none", "suffix"):
        async with await Engine.start({"model": smollm2}, method=method, **{"verifier.threads": 1}) as engine:
            texts.append((await engine.generate(prompt, sampling)).token_ids)
    assert len(texts[0]) == 4000
    assert texts[1] == texts[0]
