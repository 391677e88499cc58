from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine.config import Config
from engine.core.methods import GRAMMAR, source_of
from engine.core.tree import TokenTree
from engine.costs.cost_model import CostModel
from engine.costs.forward_time import ForwardTime
from engine.verifier import round_timer
from engine.verifier.round_timer import RoundTimer

FORWARDS = {1: 0.010, 8: 0.010, 64: 0.080}


class Part:
    """A segment of so many rows, at the beginning of a text."""

    past = 0

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


class Root(Part):
    tree = TokenTree.root_only(0)


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
    meter: RoundTimer, rows: int, tokens: int, wanted: bool = True, chunk: int = 0, lost: bool = False
) -> None:
    """A round of one request ends: rows of its tree, of another's prompt, and the tokens that it emitted."""
    one, reader = One(), One()
    concluded: list[Any] = [] if lost else [SimpleNamespace(request=one, tokens=[0] * tokens)]
    segments: list[Any] = [Part(rows)]
    if chunk:
        segments.append(Part(chunk))
        concluded.append(SimpleNamespace(request=reader, tokens=[0]))
    drafts: Any = SimpleNamespace(peer=b"there")
    meter.forward_ns = int(1e9 * meter.costs.forward.seconds(sum(map(len, segments))))
    rounds: list[Any] = [SimpleNamespace(request=one, wanted=wanted)]
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


def test_a_forward_that_was_launched_behind_another_began_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, traced = [0], list[int]()
    monkeypatch.setattr(round_timer.time, "perf_counter_ns", lambda: now[0])
    nothing: Any = None
    trace: Any = SimpleNamespace(span=lambda name, started, *_: traced.append(started))
    timer, segments = RoundTimer(Config(model="none"), nothing, nothing, trace), [Root(1)]
    for started, ended, queued, forward in ((100, 500, False, 400), (450, 800, True, 300), (850, 1000, False, 150)):
        output: Any = SimpleNamespace(wait=lambda _, ended=ended: now.__setitem__(0, ended) or 0.0)
        timer.end_forward(started, cast(Any, segments), output, queued)
        assert timer.forward_ns == forward
    assert timer.busy_ns == 850 and traced == [100, 500, 850]


def test_the_time_of_drafts_that_are_launched_behind_a_forward_is_not_the_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [0], list[Any]()
    monkeypatch.setattr(round_timer.time, "perf_counter_ns", lambda: now[0])
    nothing, drafts = cast(Any, None), cast(Any, object())
    timer = RoundTimer(Config(model="none"), nothing, nothing, cast(Any, SimpleNamespace(span=lambda *_: None)))

    def wait(behind: Any) -> float:
        waited.append(behind)
        now[0] = 9_000_000
        return 0.002

    timer.end_forward(1_000_000, cast(Any, [Root(1)]), cast(Any, SimpleNamespace(wait=wait)), False, drafts)
    assert waited == [drafts] and timer.forward_ns == 6_000_000
    noted, request = list[float](), cast(Any, SimpleNamespace(wants_draft=True, hit=False, root_only=False))
    request.waiting_since_ns, request.note_wait = 8_000_000, noted.append
    timer.observe_wait([request])
    assert noted == [pytest.approx(0.003)], "they are waited for, like what the host drafts"


SUFFIX, HEAD = source_of("suffix"), source_of("block")
ROW_S = 0.001


@pytest.mark.parametrize(
    ("tokens", "parents", "sources", "verified", "path", "emitted", "gained", "rows"),
    [
        # a model's tokens are those that retrieval alone would not have had
        ([5, 6, 7, 8], [-1, 0, 1, 2], [0, SUFFIX, HEAD | SUFFIX, HEAD], 4, [0, 1, 2, 3], [6, 7, 8, 9], (1, 2), (1, 2)),
        # rows that retrieval alone would have had verified in vain are the model's gain
        ([5, 6, 7, 8, 9], [-1, 0, 0, 2, 3], [0, HEAD, *[SUFFIX] * 3], 2, [0, 1], [6, 1], (0, 1), (3, -2)),
        # a token that retrieval alone would have had and the model kept from it is the model's loss
        ([5, 6, 7], [-1, 0, 0], [0, HEAD, SUFFIX], 2, [0], [7], (1, -1), (1, 0)),
        # whether nodes below the last token are right is not known
        ([5, 7, 8, 9, 6], [-1, 0, 1, 2, 0], [0, *[SUFFIX] * 3, HEAD], 1, [0], [7], (1, -1), (1, -1)),
        # of retrieval's own draft only what was verified counts
        ([5, 6, 7, 8], [-1, 0, 1, 0], [0, *[SUFFIX] * 3], 2, [0, 1], [6, 7], (1, 0), (1, 0)),
        # the third node is the grammar's, whose tokens are no drafter's gain
        ([5, 6], [-1, 0], [0, HEAD], 3, [0, 2], [7, 8], (0, 0), (0, 1)),
    ],
)
def test_a_model_gains_and_loses_what_retrieval_alone_would_not_have_had(
    tokens: list[int],
    parents: list[int],
    sources: list[int],
    verified: int,
    path: list[int],
    emitted: list[int],
    gained: tuple[int, int],
    rows: tuple[int, int],
) -> None:
    """Every row takes `ROW_S`; of the tree the first nodes are verified."""
    nothing: Any = None
    timer, seen = RoundTimer(Config(model="none"), nothing, nothing, nothing), SimpleNamespace()
    timer.costs = CostModel(ForwardTime({1: ROW_S, 64: 64 * ROW_S}))
    timer._rows, of_model = verified, any(source & HEAD for source in sources)
    plain = TokenTree.from_lists(tokens, parents, [1.0] * len(tokens))
    tree = TokenTree(plain.tokens, plain.parents, plain.confidence, np.array(sources, np.uint32))
    choice = SimpleNamespace(observe=lambda kinds, costs, requests, **told: vars(seen).update(told))
    request = SimpleNamespace(choice=choice, waited_s=0.002)
    kept, draft_us = np.arange(verified), 100 * of_model
    step: Any = SimpleNamespace(request=request, wanted=True, drafted=tree, draft_us=draft_us, kept=kept)
    of_path = [int(tree.source[node]) if node < len(tree) else GRAMMAR for node in path[1:]]
    result: Any = SimpleNamespace(sources=[*of_path, 0], tokens=emitted)
    drafts: Any = SimpleNamespace(peer=b"there", kinds=None)
    timer.observe_draft(step, result, drafts)
    assert (seen.by_retrieval, seen.by_model) == gained
    assert (seen.retrieval_rows_s / ROW_S, seen.model_rows_s / ROW_S) == pytest.approx(rows, abs=1e-9)
    assert seen.waited_s == 0.002 and seen.model_drafted == of_model
