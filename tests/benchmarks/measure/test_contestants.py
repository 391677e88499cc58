from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from benchmarks.measure import contestants as measured
from benchmarks.measure.contestants import without_effect
from engine.config import Config
from engine.core.errors import ConfigError, DrafterMismatch


def test_keys_that_contestants_define_otherwise_are_named() -> None:
    given = {"model": "tiny", "verifier.cut": True, "drafter.growth.policy": "adaptive"}
    assert without_effect(["none", "pld", "eagle3", "talon-suffix", "hf"], given, as_served=False) == [
        "--set verifier.cut=True does not apply to pld, eagle3: their definition has its own",
        "--set drafter.growth.policy=adaptive does not apply to eagle3: their definition has its own",
    ]


def test_a_method_as_served_takes_every_key() -> None:
    given = {"verifier.cut": False, "drafter.growth.policy": "adaptive"}
    assert without_effect(["none", "pld", "eagle3"], given, as_served=True) == []


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

    monkeypatch.setattr(measured, "start_contestant", start_contestant)
    return await measured.start_contestants([*contestants], Config(model="any"), None, [1], Console(quiet=True))


async def test_a_contestant_that_cannot_answer_is_left_out_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = {"none": Answering(), "pld": Failing(), "suffix": Answering()}
    assert [*await start(monkeypatch, contestants)] == ["none", "suffix"]
    assert [name for name, one in contestants.items() if one.closed] == ["pld"]


async def test_where_all_are_left_out_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    contestants = {"none": Answering(), "pld": Failing()}
    with pytest.raises(ConfigError, match="none of pld can be started here"):
        await start(monkeypatch, contestants)
    assert all(one.closed for one in contestants.values())
