"""The order of steps, and where states are."""

from __future__ import annotations

import random

from engine.kernels.state.walk import LEAF, StateRows, steps_of


def tree(parents: list[int], trunk: int = 0) -> StateRows:
    ends = [trunk] if trunk else []
    return StateRows([], parents, [], trunk, [5, 7][: 1 + len(ends)], ends)


def test_a_text_goes_from_slot_to_slot() -> None:
    rows = StateRows([], range(-1, 4), [], 5, [3, 8, 9], [2, 5])
    assert steps_of(rows) == ([(0, ~3, ~8), (1, ~8, ~8), (2, ~8, ~9), (3, ~9, ~9), (4, ~9, ~9)], 0)


def test_a_chain_of_drafts_needs_one_state_in_scratch() -> None:
    assert steps_of(tree([-1, 0, 1, 2], 1)) == ([(0, ~5, ~7), (1, ~7, 0), (2, 0, 0), (3, 0, LEAF)], 1)


def test_leaves_are_taken_from_the_state_of_their_parent() -> None:
    assert steps_of(tree([-1, 0, 0, 0])) == ([(0, ~5, 0), (1, 0, LEAF), (2, 0, LEAF), (3, 0, LEAF)], 1)


def test_every_node_of_a_random_tree_is_taken_with_the_state_of_its_parent() -> None:
    chance = random.Random(3)
    for nodes in [1, 2, 5, 20, 60] * 10:
        parents = [-1] + [chance.randrange(max(0, node - 6), node) for node in range(1, nodes)]
        trunk = chance.choice([0, 1])
        steps, levels = steps_of(tree(parents, trunk))
        states = {~5: -1}  # which node's state is where
        due = None  # where a state is made when the next step reads it
        for row, source, goal in steps:
            assert due in (None, source)
            due = None if goal == LEAF else goal
            assert states[source] == parents[row]
            states[goal] = row
            assert goal < levels or goal == LEAF
            assert goal != ~5 and (goal != ~7 or row < trunk), "a state that is not committed is not stored"
        assert sorted(row for row, _, _ in steps) == list(range(nodes))
