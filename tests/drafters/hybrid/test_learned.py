"""Each owner is drafted for by the head learned from its texts, and by nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.hybrid import learned
from drafters.hybrid.learned import LearnedDrafter
from engine.core.drafter_protocol import BetweenSteps, Drafter, Verdict
from engine.core.errors import ModelError
from engine.core.methods import source_of
from engine.core.outcomes import DraftQuery
from engine.core.params import SamplingParams, Speculation
from engine.core.tree import TokenTree
from engine.files.kept_texts import shelf_of
from engine.weights.installed_head import METHOD


class Part(Drafter):
    """Drafts the number of its own after any text."""

    def __init__(self, number: int, layers: tuple[int, ...] = (), source: str = METHOD):
        self.number, self.feature_layers, self.source = number, layers, source_of(source)
        self.rests, self.draft_s, self.forward_s = bool(layers), 0.001 * number, float(number)
        self.texts: dict[int, Sequence[int]] = {}
        self.seen: list[Any] = []
        self.closed = False

    def start(self, request: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.texts[request] = prompt

    def propose(self, request: int, continuation: Sequence[int] = ()) -> TokenTree:
        return TokenTree.chain([*self.texts[request], *continuation][-1], [self.number], [0.5])

    def propose_many(self, wanted: Sequence[DraftQuery], between_steps: BetweenSteps | None = None) -> list[TokenTree]:
        trees = [self.propose(*one) for one in wanted]
        if between_steps is not None:
            between_steps(lambda: dict(enumerate(trees)))
        return trees

    def observe(self, request: int, verdict: Verdict) -> None:
        self.seen.append(None if verdict.features is None else verdict.features[0, :, 0].tolist())

    def finish(self, request: int) -> None:
        del self.texts[request]

    def close(self) -> None:
        self.closed = True


def install(folder: Path, owner: str, number: int) -> None:
    """Put a head in the place of an older one."""
    place = folder / shelf_of(owner)
    made = place / f".{METHOD}-{number}"
    made.mkdir(parents=True)
    (place / METHOD).unlink(missing_ok=True)
    (place / METHOD).symlink_to(made.name)


Made = Callable[..., tuple[LearnedDrafter, dict[int, Part]]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Make the drafter; its heads are parts, and 13 cannot be loaded."""

    class Hybrid:
        def __new__(cls, head: Part, memories: Sequence[Drafter], budget: int) -> Any:
            head.head = head  # type: ignore[attr-defined]
            return head

    monkeypatch.setattr(learned, "HybridDrafter", Hybrid)

    def make(general: Part) -> tuple[LearnedDrafter, dict[int, Part]]:
        heads: dict[int, Part] = {}

        def load(place: Path) -> Any:
            number = int(place.name.rpartition("-")[2])
            if number == 13:
                raise ModelError("drafter.path: is of another version")
            return heads.setdefault(number, Part(number, (2, 5)))

        return LearnedDrafter(general, [], load, tmp_path, 24), heads

    return make


def start(drafter: LearnedDrafter, request: int, owner: str | None) -> None:
    drafter.start(request, [7], SamplingParams(speculation=Speculation(owner=owner)))


def drafts(drafter: LearnedDrafter, *requests: int) -> list[int]:
    return [int(tree.tokens[1]) for tree in drafter.propose_many([(request, ()) for request in requests])]


def test_an_owner_is_drafted_for_by_its_own_head_and_nobody_elses(made: Made, tmp_path: Path) -> None:
    install(tmp_path, "ann", 1)
    install(tmp_path, "ben", 2)
    drafter, heads = made(Part(3, source="suffix"))
    owners = ["ann", "ben", "cat", None, "ann"]
    for request, owner in enumerate(owners):
        start(drafter, request, owner)
    assert drafts(drafter, 0, 1, 2, 3, 4) == [1, 2, 3, 3, 1]
    assert drafts(drafter, 4, 2, 1) == [1, 3, 2]
    assert [*heads[1].texts] == [0, 4] and [*heads[2].texts] == [1]
    tree = drafter.propose(2, [8])
    assert tree.tokens.tolist() == [8, 3] and tree.source[1] == source_of("suffix")
    assert drafter.following([(1, ()), (3, ())]) == [([2], [0.5]), ([3], [0.5])]


def test_trees_under_way_are_told_for_the_requests_that_they_are_of(made: Made, tmp_path: Path) -> None:
    install(tmp_path, "ann", 1)
    drafter, _ = made(Part(3))
    start(drafter, 0, None)
    start(drafter, 1, "ann")
    told: list[dict[int, int]] = []

    def between(so_far: Callable[[], dict[int, TokenTree]]) -> None:
        told.append({row: int(tree.tokens[1]) for row, tree in so_far().items()})

    drafter.propose_many([(1, ()), (0, ()), (1, [9])], between)
    assert told == [{0: 1, 2: 1}, {0: 1, 2: 1, 1: 3}]


def test_each_part_gets_the_states_of_its_own_layers(made: Made, tmp_path: Path) -> None:
    install(tmp_path, "ann", 1)
    general = Part(3, (5, 9))
    drafter, heads = made(general)
    assert drafter.feature_layers == (2, 5, 9)
    features = np.asarray([[[20], [50], [90]]], np.uint16)
    for request, owner in enumerate(("ann", "cat")):
        start(drafter, request, owner)
        drafter.observe(request, Verdict(TokenTree.root_only(7), [0], [8], features))
        drafter.observe(request, Verdict(TokenTree.root_only(8), [0], [9], None))
    assert (heads[1].seen, general.seen) == ([[20, 50], None], [[50, 90], None])


def test_retrieval_alone_wants_no_states_until_a_head_is_learned(made: Made, tmp_path: Path) -> None:
    drafter, _ = made(Part(3, source="suffix"))
    assert (drafter.feature_layers, drafter.rests) == ((), False) and not drafter.renew()
    install(tmp_path, "ann", 1)
    assert drafter.renew() and not drafter.renew()
    assert (drafter.feature_layers, drafter.rests, drafter.draft_s) == ((2, 5), True, 0.003)


def test_a_newer_head_takes_over_and_one_that_is_gone_drafts_no_more(made: Made, tmp_path: Path) -> None:
    install(tmp_path, "ann", 1)
    drafter, heads = made(Part(3))
    install(tmp_path, "ann", 2)
    assert drafter.renew() and heads[1].closed
    start(drafter, 0, "ann")
    assert drafts(drafter, 0) == [2]
    drafter.finish(0)
    (tmp_path / shelf_of("ann") / METHOD).unlink()
    assert drafter.renew() and heads[2].closed
    start(drafter, 1, "ann")
    assert drafts(drafter, 1) == [3]


def test_a_head_that_cannot_be_used_is_told_in_a_line_and_the_old_one_goes_on(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "ann", 1)
    drafter, heads = made(Part(3))
    install(tmp_path, "ann", 13)
    drafter.renew()
    assert not drafter.renew()  # it is not tried again and again
    start(drafter, 0, "ann")
    assert drafts(drafter, 0) == [1] and not heads[1].closed
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("talon: drafter.learned=") and line.endswith(": is of another version")


def test_the_end_of_the_drafter_is_that_of_its_parts(made: Made, tmp_path: Path) -> None:
    install(tmp_path, "ann", 1)
    general = Part(3)
    drafter, heads = made(general)
    drafter.close()
    assert general.closed and heads[1].closed
