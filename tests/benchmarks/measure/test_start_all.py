from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from benchmarks.measure import bench
from engine.config import Config
from engine.core.errors import ConfigError, DrafterMismatch


class Answering:
    closed = False

    async def answer(self, prompt: list[int], sampling: Any) -> Any:
        return None

    async def close(self) -> None:
        self.closed = True


class Failing(Answering):
    """Starts, but cannot answer."""

    async def answer(self, prompt: list[int], sampling: Any) -> Any:
        raise DrafterMismatch("no such head")


async def start(monkeypatch: pytest.MonkeyPatch, contestants: dict[str, Answering]) -> dict[str, Any]:
    async def start_contestant(name: str, *_: Any) -> Answering:
        return contestants[name]

    monkeypatch.setattr(bench, "start_contestant", start_contestant)
    return await bench.start_all([*contestants], Config(model="any"), None, [1], Console(quiet=True))


async def test_a_contestant_that_cannot_answer_is_left_out_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = {"none": Answering(), "pld": Failing(), "suffix": Answering()}
    assert [*await start(monkeypatch, contestants)] == ["none", "suffix"]
    assert [name for name, one in contestants.items() if one.closed] == ["pld"]


async def test_where_all_are_left_out_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = {"none": Answering(), "pld": Failing()}
    with pytest.raises(ConfigError, match="none of pld can be started here"):
        await start(monkeypatch, contestants)
    assert all(one.closed for one in contestants.values())
