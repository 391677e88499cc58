"""The two workers at once. How much of the draft model's time lies beside the target's forwards? What comes back after
each worker is killed: the text, and the GPU's memory?
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.api import Engine
from engine.core.params import SamplingParams
from engine.frontend.processes import ProcessWorker

from .findings import Record, tried
from .models import save_head, save_small

_PROMPT = list(b"the cat sat on the mat, the cat sat on the hat")
_TOKENS = 300
_BACK_S = 40.0


def run(device: str) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as folder:
        model = save_small(Path(folder) / "model", device == "cpu")
        save_head("eagle3", AutoConfig.from_pretrained(model), Path(folder) / "eagle3", "cpu")
        settings = {
            "model": model, "device": device, "dtype": "bfloat16", "method": "eagle3", "mode": "async",
            "drafter": {"path": str(Path(folder) / "eagle3")}, "verifier": {"kv_memory": 256 << 20, "cut": False},
        }  # fmt: skip
        yield tried("overlap, ipc", _overlap, settings | {"transport": "ipc"}, Path(folder))
        yield tried("kills", lambda: asyncio.run(_kills(settings | {"transport": "ipc"}, device)))
        yield tried("overlap, inproc", _overlap, settings | {"transport": "inproc"}, Path(folder))


def _overlap(settings: dict[str, Any], folder: Path) -> Record:
    """Return from a trace the seconds of the verifier's forwards, of drafts, and of both at once."""
    trace = folder / f"{settings['transport']}.json"

    async def work() -> float:
        async with await Engine.start(settings | {"trace": str(trace)}) as engine:
            await engine.generate(_PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
            result = await engine.generate(_PROMPT, SamplingParams(max_tokens=_TOKENS, ignore_eos=True))
            return result.metrics.tokens_per_second

    rate = asyncio.run(work())
    events = json.loads(trace.read_text())["traceEvents"]
    busy: dict[str, list[tuple[int, int]]] = {"verify": [], "draft": []}
    names: dict[str, int] = {}
    for span in (event for event in events if event["ph"] == "X"):
        name = span["name"]
        names[name] = names.get(name, 0) + 1
        kind = "verify" if name == "verify" else "draft" if name.startswith("draft") else None
        if kind is not None:
            busy[kind].append((span["ts"], span["ts"] + span["dur"]))
    return {
        "tokens_per_s": round(rate, 1),
        "verify_ms": _total_ms(busy["verify"]),
        "draft_ms": _total_ms(busy["draft"]),
        "both_ms": round(sum(max(0, min(b, d) - max(a, c)) for a, b in busy["verify"] for c, d in busy["draft"]) / 1e3),
        "spans": names,
    }


def _total_ms(spans: list[tuple[int, int]]) -> int:
    return round(sum(end - begin for begin, end in spans) / 1000)


async def _kills(settings: dict[str, Any], device: str) -> Record:
    """Kill the drafter, then the verifier, each in the middle of an answer."""
    found: Record = {"free_gb": [_free_gb(device)]}
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    async with await Engine.start(settings) as engine:
        expected = (await engine.generate(_PROMPT, sampling)).token_ids
        found["free_gb"].append(_free_gb(device))
        for role in ("drafter", "verifier"):
            answer = asyncio.create_task(engine.generate(_PROMPT, sampling))
            await asyncio.sleep(0.1)
            worker: Any = engine._workers.running[role]
            killed, started = worker.pid, time.perf_counter()
            os.kill(killed, signal.SIGKILL)
            same = (await asyncio.wait_for(answer, _BACK_S)).token_ids == expected
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(_replaced(engine, role, killed), _BACK_S)
            now: Any = engine._workers.running.get(role)
            found[role] = {
                "text": same,
                "back_s": round(time.perf_counter() - started, 2),
                "replaced": now is not None and now.pid != killed and engine._ready[role].is_set(),
                "forked": not isinstance(now, ProcessWorker),
            }
            again = await asyncio.wait_for(engine.generate(_PROMPT, sampling), _BACK_S)
            found[role]["next_text"] = again.token_ids == expected
            found["free_gb"].append(_free_gb(device))
    await asyncio.sleep(1)
    found["free_gb"].append(_free_gb(device))
    wrong = [role for role in ("drafter", "verifier") if not all(found[role][k] for k in ("text", "replaced"))]
    return found | ({"failed": f"not as before after the kill of {wrong}"} if wrong else {})


async def _replaced(engine: Engine, role: str, killed: int) -> None:
    while True:
        worker: Any = engine._workers.running.get(role)
        if worker is not None and worker.pid not in (0, killed) and engine._ready[role].is_set():
            return
        await asyncio.sleep(0.02)


def _free_gb(device: str) -> float:
    return round(torch.cuda.mem_get_info()[0] / 2**30, 2) if device == "cuda" else 0.0
