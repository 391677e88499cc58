"""Which nodes of a round's trees are verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.tree import TokenTree
from engine.verifier.cost_model import CostModel
from engine.verifier.forward_time import ForwardTime
from engine.verifier.step_input import Proposal, StepInput, paying

DEAR, CHEAP = CostModel(ForwardTime({1: 1.0, 64: 64.0})), CostModel(ForwardTime({1: 1.0, 64: 1.001}))
"""Forwards where each row takes as long as the first, and where further rows are nearly free."""


def worth(*probs: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(probs, np.float32)


def test_every_tree_keeps_its_root_even_if_another_trees_nodes_are_worth_as_much() -> None:
    kept = paying([worth(1.0, 1.0, 1.0), worth(1.0)], DEAR)
    assert [nodes.tolist() for nodes in kept] == [[0], [0]]


def test_rows_that_cost_nothing_are_all_kept_and_the_likeliest_first_where_they_cost() -> None:
    trees = [worth(1.0, 0.3, 0.2), worth(1.0, 0.9)]
    assert [nodes.tolist() for nodes in paying(trees, CHEAP)] == [[0, 1, 2], [0, 1]]
    steep = CostModel(ForwardTime({1: 1.0, 2: 1.0, 3: 1.4, 64: 64.0}))
    assert [nodes.tolist() for nodes in paying(trees, steep)] == [[0], [0, 1]]


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=8), min_size=1, max_size=4), st.floats(0.0, 1.0))
def test_a_kept_nodes_better_nodes_are_kept_too(probs: list[list[float]], row_s: float) -> None:
    """Worth never grows along a path, so a node's ancestors are among the better ones."""
    trees = [worth(1.0, *sorted(some, reverse=True)) for some in probs]
    for nodes in paying(trees, CostModel(ForwardTime({1: 1.0, 64: 1.0 + 63 * row_s}))):
        assert nodes.tolist() == list(range(len(nodes))) and len(nodes)


@pytest.mark.parametrize(
    ("drafted", "alone", "asked"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_round_remembers_whether_a_drafter_was_asked_even_when_the_next_one_is_decided(
    drafted: bool, alone: bool, asked: bool
) -> None:
    request: Any = SimpleNamespace(wants_draft=drafted, root_only=alone, forced_tokens=lambda tree: [])
    request.admitted = lambda tree: np.arange(len(tree))
    round_ = StepInput.of(request, Proposal(0, TokenTree.root_only(7)))
    request.root_only = not alone
    assert round_.asked == asked
