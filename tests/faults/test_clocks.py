"""Clocks that jump: a machine that was suspended, or moved to another host."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from engine import Engine
from tests.faults.test_faults import LONG, PROMPT, _own_temporary_folder, expected_text

__all__ = ["_own_temporary_folder"]
HOUR_S = 3600


@pytest.mark.parametrize("mode", ["sequential", "async", "auto"])
async def test_hours_that_pass_between_two_looks_at_the_clock_change_no_text_and_end_nobody(
    tiny: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    expected = await expected_text(tiny)
    async with await Engine.start({"model": tiny}, method="pld", mode=mode, transport="inproc") as engine:
        before = dict(engine._workers.running)
        now, now_ns, looks, passed = time.perf_counter, time.perf_counter_ns, itertools.count(), 0

        def jump() -> int:
            nonlocal passed
            passed += HOUR_S if next(looks) % 50 == 0 else 0
            return passed

        monkeypatch.setattr(time, "perf_counter", lambda: now() + jump())  # the workers are threads: it is theirs too
        monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns() + jump() * 10**9)
        monkeypatch.setattr(time, "monotonic", lambda: now() + jump())
        results = await asyncio.gather(*(engine.generate(PROMPT, LONG) for _ in range(3)))
        monkeypatch.undo()
        assert [result.token_ids for result in results] == [expected] * 3
        assert dict(engine._workers.running) == before
        after = await engine.generate(PROMPT, LONG)
    assert passed > 10 * HOUR_S
    assert after.token_ids == expected
    assert after.metrics.mean_accepted_tokens > 1  # the drafter is still heard
