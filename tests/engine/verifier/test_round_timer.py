from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Config
from engine.verifier.cost_model import CostModel
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
    made.costs = CostModel(FORWARDS)
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
    drafts: Any = SimpleNamespace(drafter=b"there", wants=SimpleNamespace(rests=False))
    meter.forward_ns = int(1e9 * meter.costs.seconds(sum(map(len, segments))))
    rounds: list[Any] = [SimpleNamespace(request=one, asked=asked)]
    meter.observe_round(concluded, rounds, segments, drafts)


@pytest.mark.parametrize("chunk", [0, 16])
def test_drafts_that_gain_nothing_are_not_awaited_again_even_if_a_prompt_was_read_beside_them(
    meter: RoundTimer, chunk: int
) -> None:
    assert meter.costs.worth_waiting(1, 1)
    for _ in range(10):
        end_round(meter, rows=32, tokens=1, chunk=chunk)
    assert not meter.costs.worth_waiting(1, 1)


def test_what_drafts_gain_is_asked_of_the_rounds_that_had_asked_for_them(meter: RoundTimer) -> None:
    gained = meter.costs.worth_waiting(1, 1)
    for _ in range(30):
        end_round(meter, rows=32, tokens=1, asked=False)
    assert meter.costs.worth_waiting(1, 1) == gained


def test_a_round_that_lost_its_request_tells_nothing_of_drafts(meter: RoundTimer) -> None:
    for _ in range(30):
        end_round(meter, rows=32, tokens=1, lost=True)
    assert meter.costs.worth_waiting(1, 1)


def test_rounds_that_read_a_prompt_do_not_change_how_many_tokens_a_round_is_thought_to_emit(meter: RoundTimer) -> None:
    for _ in range(30):
        end_round(meter, rows=8, tokens=8, chunk=16)
    assert meter.costs.rate(1) == pytest.approx(1 / meter.costs.seconds(1), rel=0.2)
    for _ in range(30):
        end_round(meter, rows=8, tokens=8)
    assert meter.costs.rate(1) > 3 / meter.costs.seconds(8)


def test_the_cost_model_hears_of_rows_keys_and_past_positions(
    meter: RoundTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, tuple[Any, ...]] = {}
    for name in ("observe_forward", "observe_drafts", "observe_round"):
        monkeypatch.setattr(meter.costs, name, lambda *told, name=name: heard.update({name: told}))
    monkeypatch.setattr(Part, "past", 100)
    end_round(meter, rows=4, tokens=3)
    assert heard["observe_forward"][:2] == (4, (100, 400))
    assert heard["observe_round"][:3] == (1, 4, 3) and heard["observe_round"][4] == 100
    end_round(meter, rows=4, tokens=3, chunk=8)
    assert heard["observe_forward"][:2] == (12, (200, 1200))
    assert heard["observe_drafts"] == (1, 1, 4, 3), "without the prompt's rows"
