from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Config
from engine.verifier.cost_model import CostModel
from engine.verifier.forward_time import ForwardTime
from engine.verifier.round_timer import RoundTimer

FORWARDS = {1: 0.010, 8: 0.010, 64: 0.080}


class Part:
    """A segment of so many rows, at the beginning of a text."""

    past = 0

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


class One:
    """A request that goes on alone after its round."""

    round, wants_draft, root_only = 2, True, True


@pytest.fixture
def meter() -> RoundTimer:
    nothing: Any = None
    made = RoundTimer(Config(model="none"), nothing, nothing, nothing)
    made.costs = CostModel(ForwardTime(FORWARDS))
    made.costs.observe_wait(0.002)
    end_round(made, rows=1, tokens=1, lost=True)  # from its end on, time counts
    return made


def end_round(
    meter: RoundTimer, rows: int, tokens: int, asked: bool = True, chunk: int = 0, lost: bool = False
) -> None:
    """A round of one request ends: rows of its tree, of another's prompt, and the tokens that it emitted."""
    one, reader = One(), One()
    concluded: list[Any] = [] if lost else [SimpleNamespace(request=one, tokens=[0] * tokens)]
    segments: list[Any] = [Part(rows)]
    if chunk:
        segments.append(Part(chunk))
        concluded.append(SimpleNamespace(request=reader, tokens=[0]))
    drafts: Any = SimpleNamespace(drafter=b"there")
    meter.forward_ns = int(1e9 * meter.costs.forward.seconds(sum(map(len, segments))))
    rounds: list[Any] = [SimpleNamespace(request=one, asked=asked)]
    meter.observe_round(concluded, rounds, segments, drafts)


def test_rounds_that_read_a_prompt_do_not_change_how_many_tokens_a_round_is_thought_to_emit(meter: RoundTimer) -> None:
    for _ in range(30):
        end_round(meter, rows=8, tokens=8, chunk=16)
    assert meter.costs.rate(1) == pytest.approx(1 / meter.costs.forward.seconds(1), rel=0.2)
    for _ in range(30):
        end_round(meter, rows=8, tokens=8)
    assert meter.costs.rate(1) > 3 / meter.costs.forward.seconds(8)


def test_the_cost_model_hears_of_rows_keys_and_past_positions(
    meter: RoundTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, tuple[Any, ...]] = {}
    for of, name in ((meter.costs.forward, "observe"), (meter.costs, "observe_round")):
        monkeypatch.setattr(of, name, lambda *told, name=name: heard.update({name: told}))
    monkeypatch.setattr(Part, "past", 100)
    end_round(meter, rows=4, tokens=3)
    assert heard["observe"][:2] == (4, (100, 400))
    assert heard["observe_round"][:3] == (1, 4, 3) and heard["observe_round"][4] == 100
    end_round(meter, rows=4, tokens=3, chunk=8)
    assert heard["observe"][:2] == (12, (200, 1200))
