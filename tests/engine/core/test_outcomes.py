from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.outcomes import DraftQuery, Following, Outcome, likeliest
from engine.core.tree import TokenTree
from engine.costs.constants import LEAST_OUTCOME

# 7 -> 8 (0.6) -> 9 (0.5), 7 -> 5 (0.1)
TREE = TokenTree.from_lists([7, 8, 9, 5], [-1, 0, 1, 0], [1.0, 0.6, 0.5, 0.1])
SEEN = {(): ([8, 5, 4], [0.6, 0.1, 0.2]), (8,): ([9, 3], [0.8, 0.1]), (8, 9): ([2, 1], [0.9, 0.08]), (5,): ([], [])}


def following(wanted: Sequence[DraftQuery]) -> list[Following]:
    return [SEEN[tuple(path)] for _, path in wanted]


def test_outcomes_are_ranked_by_where_the_round_ends_and_what_is_drawn_there() -> None:
    outcomes = likeliest({1: TREE}, following, limit=8, least=LEAST_OUTCOME)
    assert [(o.node, o.token) for o in outcomes] == [(2, 2), (0, 4), (1, 3), (2, 1)]
    # ends at the root: 1 - 0.6 - 0.1; token 4 then has 0.2 of the 0.3 that its children leave
    assert [o.prob for o in outcomes] == pytest.approx([0.45, 0.2, 0.05, 0.04], abs=1e-6)


def test_only_the_likeliest_are_returned() -> None:
    assert likeliest({1: TREE}, following, limit=1, least=LEAST_OUTCOME) == [Outcome(1, 2, 2, pytest.approx(0.45))]
    assert [o.token for o in likeliest({1: TREE}, following, limit=8, least=0.1)] == [2, 4]


def test_a_drafter_that_foresees_nothing_has_no_outcomes() -> None:
    assert likeliest({1: TREE}, lambda wanted: [([], [])] * len(wanted), limit=8, least=LEAST_OUTCOME) == []


def test_outcomes_of_several_rounds_are_ranked_together() -> None:
    sure = TokenTree.from_lists([7, 8], [-1, 0], [1.0, 0.95])
    outcomes = likeliest({1: TREE, 2: sure}, following, limit=2, least=LEAST_OUTCOME)
    assert [(o.request, o.node, o.token) for o in outcomes] == [(2, 1, 9), (1, 2, 2), (1, 0, 4), (2, 1, 3)]
