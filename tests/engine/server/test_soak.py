"""Mixed requests against one server for a long time (`make soak MINUTES=30`): its memory stays flat."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.server.figures import settle
from tests.engine.server.process import ServerProcess, serving

CLIENTS, SAMPLE_S = 8, 5.0
GROWTH = 1.1  # of all the server's processes, from the first third of the run to the last
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 3, "temperature": 1.0, "logprobs": 2, "echo": True},
    "grammar": {"structured_outputs": {"json": SCHEMA}},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "left": {"stream": True, "max_tokens": 300},
    "refused": {"tools": [{}]},
}


@pytest.mark.slow
def test_a_server_under_mixed_load_stays_as_large_as_it_was(tiny: str) -> None:
    minutes = float(os.environ.get("TALON_SOAK_MINUTES", "1"))
    bounded = ("--method", "suffix", "--set", "verifier.kv_memory=2097152")
    with serving("--set", f"model={tiny}", "--served-model-name", "tiny", *bounded, whole=True) as server:
        came, sizes = asyncio.run(_load(server, 60 * minutes))
        settle(server)
    assert not {kind: count for kind, count in came.items() if kind.endswith("not as expected")}, came
    assert all(came[kind] for kind in KINDS), came
    third = max(1, len(sizes) // 3)
    early, late = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
    print(f"{dict(came)}; {early:.0f} MB in the first third, {late:.0f} MB in the last")
    assert late < GROWTH * early, sizes


async def _load(server: ServerProcess, seconds: float) -> tuple[Counter[str], list[float]]:
    """How many answers of each kind came, and the resident MB of all processes at each sample."""
    came: Counter[str] = Counter()
    sizes: list[float] = []
    started_s = time.monotonic()

    async def client(rng: random.Random, http: httpx.AsyncClient) -> None:
        while time.monotonic() < started_s + seconds:
            kind = rng.choice(list(KINDS))
            prompt = "".join(rng.choices("abc 123", k=rng.randrange(1, 60)))
            body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 40)}
            right = await _ask(http, kind, body | KINDS[kind])
            came[kind if right else f"{kind}, not as expected"] += 1

    async def watch() -> None:
        while time.monotonic() < started_s + seconds:
            await asyncio.sleep(SAMPLE_S)
            sizes.append(_resident_mb(server))
            print(f"{time.monotonic() - started_s:.0f} s: {dict(came)}; {sizes[-1]:.0f} MB", flush=True)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await asyncio.gather(watch(), *(client(random.Random(number), http) for number in range(CLIENTS)))
    return came, sizes


async def _ask(http: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> bool:
    """Whether the answer is what that kind of request gets."""
    if kind == "left":
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                return answer.status_code == 200
    answer = await http.post("/v1/completions", json=body)
    if kind == "refused":
        return answer.status_code == 400
    if kind == "stream":
        return answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    return answer.status_code == 200 and len(answer.json()["choices"]) == body.get("n", 1)


def _resident_mb(server: ServerProcess) -> float:
    process = psutil.Process(server.process.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20
