"""Hidden states on their way to a draft head and into the blocks that requests share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import BLOCK_SIZE
from engine.core.hidden_states import HiddenStates, States


def states_of(positions: range) -> States:
    """States that tell their position."""
    return np.asarray(positions, np.uint16)[:, None, None].repeat(2, 1).repeat(3, 2)


def test_what_was_not_sent_is_taken_once_in_the_order_of_positions() -> None:
    features = HiddenStates(shared=True)
    features.adopt(states_of(range(16)))
    features.add(16, states_of(range(16, 20)), unsent=True)
    features.add(20, states_of(range(20, 21)), unsent=True)
    assert np.array_equal(features.take(), states_of(range(21)))
    assert features.take().shape == (0, 0, 0)


def test_what_the_drafter_knows_is_not_sent_again() -> None:
    features = HiddenStates(shared=True)
    features.add(0, states_of(range(20)), unsent=False)
    assert not features.take().size
    assert features.of_block(0) is not None


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 3))
def test_a_block_has_the_states_of_its_positions_however_they_came(steps: list[int], adopted: int) -> None:
    features, length, published = HiddenStates(shared=True), adopted * BLOCK_SIZE, adopted
    for count in steps:
        features.add(length, states_of(range(length, length + count)), unsent=True)
        length += count
        for index in range(published, length // BLOCK_SIZE):
            states = features.of_block(index)
            assert states is not None
            assert np.array_equal(states, states_of(range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)))
        published = length // BLOCK_SIZE


def test_a_block_of_which_some_positions_are_not_known_has_none() -> None:
    features = HiddenStates(shared=True)
    features.add(3, states_of(range(3, 20)), unsent=True)  # a drafter joined behind position 3
    assert features.of_block(0) is None
    features.add(20, states_of(range(20, 40)), unsent=True)
    second = features.of_block(1)
    assert second is not None and np.array_equal(second, states_of(range(16, 32)))


def test_positions_that_are_read_again_replace_what_was_kept() -> None:
    features = HiddenStates(shared=True)
    features.add(0, states_of(range(10)), unsent=True)
    features.add(0, states_of(range(16)), unsent=False)  # after a preemption
    block = features.of_block(0)
    assert block is not None and np.array_equal(block, states_of(range(16)))


@pytest.mark.parametrize("shared", [True, False])
def test_where_nothing_is_shared_nothing_is_kept(shared: bool) -> None:
    features = HiddenStates(shared)
    features.add(0, states_of(range(BLOCK_SIZE)), unsent=True)
    assert (features.of_block(0) is not None) == shared
    assert len(features.take()) == BLOCK_SIZE
