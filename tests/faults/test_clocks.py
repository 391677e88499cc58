"""Clocks that jump: a machine that was suspended, or moved to another host."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine import Engine
from tests.faults.test_faults import LONG, PROMPT, _own_temporary_folder, expected_text

__all__ = ["_own_temporary_folder"]
HOUR_S = 3600
perf_counter, perf_counter_ns, monotonic = time.perf_counter, time.perf_counter_ns, time.monotonic


@pytest.mark.parametrize("mode", ["sequential", "async", "auto"])
async def test_hours_that_pass_between_two_looks_at_the_clock_change_no_text_and_end_nobody(
    tiny: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    expected = await expected_text(tiny)
    looks, passed_s, restless, lock = itertools.count(), 0, True, threading.Lock()

    def jump() -> int:
        nonlocal passed_s
        with lock:  # without it, two threads' sums could take a jump back, which no such clock does
            passed_s += HOUR_S if restless and next(looks) % 50 == 0 else 0
            return passed_s

    monkeypatch.setattr("engine.placement._can_overlap", lambda _: True)
    options: dict[str, Any] = {"method": "pld", "mode": mode, "transport": "inproc", "verifier.threads": 1}
    async with await Engine.start({"model": tiny}, **options) as engine:
        before = dict(engine._workers.running)
        monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + jump())  # the workers' too: they are threads
        monkeypatch.setattr(time, "perf_counter_ns", lambda: perf_counter_ns() + jump() * 10**9)
        watch = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: monotonic() + jump())
        monkeypatch.setattr("engine.frontend.supervisor.time", watch)  # the event loop's own timers are not ours to try
        monkeypatch.setattr("engine.frontend.processes.time", watch)
        results = await asyncio.gather(*(engine.generate(PROMPT, LONG) for _ in range(3)))
        restless = False
        assert [result.token_ids for result in results] == [expected] * 3
        assert dict(engine._workers.running) == before
        assert (await engine.generate(PROMPT, LONG)).token_ids == expected
    assert passed_s > 10 * HOUR_S
