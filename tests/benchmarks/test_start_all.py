from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from benchmarks import bench
from engine.config import Config
from engine.errors import DrafterMismatch


class FailingContestant:
    """Starts, but cannot answer."""

    closed = False

    async def answer(self, prompt: list[int], sampling: Any) -> Any:
        raise DrafterMismatch("no such head")

    async def close(self) -> None:
        self.closed = True


async def test_a_contestant_that_cannot_answer_is_left_out_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingContestant()

    async def start(*_: Any) -> FailingContestant:
        return failing

    monkeypatch.setattr(bench, "start_contestant", start)
    assert await bench.start_all(["pld"], Config(model="any"), None, [1], Console(quiet=True)) == {}
    assert failing.closed
