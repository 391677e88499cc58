"""A draft model that dies is back at once: its successor is forked from a process that has imported all it needs."""

from __future__ import annotations

import os
import select
import signal
import time

import pytest

from engine import Engine
from engine.config import load
from engine.nursery import ForkedWorker, Nursery
from tests.faults.test_endurance import is_running
from tests.faults.test_faults import (
    THREADS,
    _own_temporary_folder,
    drafts_arrive,
    expected_text,
    pid_of,
    replaced,
    until,
)

__all__ = ["_own_temporary_folder"]


@pytest.fixture(params=["drafter", "nursery"])
def victim(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_killed_draft_model_is_replaced_by_a_fork_while_the_nursery_lives(
    tiny: str, tiny_draft: str, victim: str
) -> None:
    expected = await expected_text(tiny)
    options = THREADS | {"mode": "async", "drafter.path": tiny_draft, "verifier.cut": False}
    async with await Engine.start({"model": tiny}, method="sps", **options) as engine:
        nursery = engine._workers._nursery
        assert nursery is not None
        await until(nursery.ready, 180)  # it imports when nobody else wants the cores
        pids = [nursery._process.pid]
        if victim == "nursery":
            os.kill(pids[0], signal.SIGKILL)
            nursery._process.wait()
        for _ in range(2 if victim == "drafter" else 1):
            pids.append(first := pid_of(engine, "drafter"))
            os.kill(first, signal.SIGKILL)
            killed_s = time.monotonic()
            await replaced(engine, "drafter", first)
            print(f"back after {time.monotonic() - killed_s:.2f} s")
            assert isinstance(engine._workers.running["drafter"], ForkedWorker) == (victim == "drafter")
            await drafts_arrive(engine, expected)
        pids += [pid_of(engine, role) for role in ("verifier", "drafter")]
    assert not any(is_running(pid) for pid in pids)


def test_it_ends_without_a_word_when_the_front_end_goes(tiny_draft: str, capfd: pytest.CaptureFixture[str]) -> None:
    config = load({"model": "any"}, {"method": "sps", "drafter.path": tiny_draft})
    nursery = Nursery(config, dict(os.environ))
    select.select([nursery._socket], [], [], 180)  # it is ready, which nobody reads
    nursery._socket.close()
    assert nursery._process.wait(60) == 0
    assert capfd.readouterr().err == ""
