from __future__ import annotations

from drafters.lookup.recycling import TokenRecycling
from engine.core.drafter_protocol import Verdict
from engine.core.params import SamplingParams, Speculation
from engine.core.tree import TokenTree
from retrieval_index.memories import LEAST


def started(prompt: list[int], **options: int) -> TokenRecycling:
    drafter = TokenRecycling(**options)
    drafter.start(1, prompt, SamplingParams())
    return drafter


def test_the_latest_successor_comes_first_and_successors_are_followed_to_the_depth() -> None:
    assert started([1, 2, 1, 3, 1], depth=1).propose(1).validate(10).tokens.tolist() == [1, 3, 2]
    assert started([1, 2, 3, 4, 5, 1], depth=3).propose(1).tokens.tolist() == [1, 2, 3, 4]


def test_only_so_many_successors_are_kept_and_the_budget_holds() -> None:
    drafter = started([token for i in range(2, 30) for token in (1, i)] + [1], successors=8, budget=20)
    tree = drafter.propose(1)
    assert len(tree.children(0)) == 8
    assert len(tree) == 20


def test_given_candidates_replace_observed_ones() -> None:
    drafter = started([1, 2, 1], depth=1)
    drafter.recycle(1, 1, [7, 8])
    assert drafter.propose(1).tokens.tolist() == [1, 7, 8]


def test_the_table_is_shared_by_requests_and_learns_from_verdicts() -> None:
    drafter = started([1])
    drafter.observe(1, Verdict(TokenTree.root_only(1), [0], [2, 3]))
    drafter.finish(1)
    drafter.start(2, [2], SamplingParams())
    assert drafter.propose(2).child(0, 3) is not None
    assert drafter.propose(2, [1]).child(0, 2) is not None


def test_no_request_is_drafted_for_from_the_table_of_another_owner() -> None:
    drafter = TokenRecycling()

    def knows(request: int, owner: str | None) -> bool:
        drafter.start(request, [1], SamplingParams(speculation=Speculation(owner=owner)))
        found = drafter.propose(request).child(0, 2) is not None
        drafter.observe(request, Verdict(TokenTree.root_only(1), [0], [2, 3]))
        drafter.finish(request)
        return found

    asked = ["a", "a", "b", "", None, None, "b"]
    assert [knows(i, owner) for i, owner in enumerate(asked)] == [False, True, False, False, False, False, True]


def test_tables_are_bounded_together() -> None:
    drafter = TokenRecycling(capacity=2 * LEAST)
    for request, owner in enumerate("abc"):
        drafter.start(request, [1, 2], SamplingParams(speculation=Speculation(owner=owner)))
        drafter.finish(request)
    assert [drafter.memories.of(owner) is not None for owner in "abc"] == [False, True, True]
