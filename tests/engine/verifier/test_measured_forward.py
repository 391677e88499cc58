"""The forwards of start-up run behind a text of the length asked for, and leave nothing behind."""

from __future__ import annotations

import pytest

from engine.model.target import Target
from engine.verifier.round_timer import BESIDE, MeasuredForward


@pytest.fixture(scope="module")
def target(tiny: str) -> Target:
    return Target.load(tiny, kv_memory=1 << 20)


def test_a_forward_runs_behind_as_many_positions_as_asked_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.pool is not None
    seen: list[tuple[int, int]] = []
    run = Target.run

    def noted(target: Target, segments: list, *rest: object) -> object:
        seen.extend((len(segment), segment.past) for segment in segments)
        return run(target, segments, *rest)

    monkeypatch.setattr(Target, "run", noted)
    forward, free = MeasuredForward(target, most=8), target.pool.free
    for rows, past in ((1, 0), (8, 0), (4, 200), (2, 10_000)):
        assert forward.seconds(rows, past) > 0
    most = min(256, target.pool.blocks * 16 - 8)  # half of the context, or all of the pool
    assert [one for one in seen if one[1]] == [(1, BESIDE), (8, BESIDE), (4, 200 + BESIDE), (2, most)]
    assert forward.longest == most - BESIDE
    forward.close()
    assert target.pool.free == free


def test_the_rows_are_those_of_a_tree(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    run = Target.run

    def noted(target: Target, segments: list, *rest: object) -> object:
        depths.append(int(segments[0].tree.depths.max()))
        return run(target, segments, *rest)

    monkeypatch.setattr(Target, "run", noted)
    forward = MeasuredForward(target, most=30)
    forward.seconds(21, 0)
    forward.close()
    assert depths == [0, 2]
