"""Hidden states on their way to a draft head and into the blocks that requests share."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.core.batch import BLOCK_SIZE
from engine.core.hidden_states import HiddenStates, HostStates


def states_of(positions: range) -> HostStates:
    """States that tell their position."""
    return np.asarray(positions, np.uint16)[:, None, None].repeat(2, 1).repeat(3, 2)


def test_what_the_drafter_knows_is_not_sent_again() -> None:
    features = HiddenStates(shared=True)
    features.add(0, states_of(range(20)), unsent=False)
    assert not features.take().size
    assert features.of_block(0) is not None


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


@given(st.lists(st.integers(1, 40), min_size=1, max_size=100), st.integers(0, 3))
def test_blocks_have_the_states_of_their_positions_and_what_was_not_sent_is_taken_once_on_a_device_as_on_the_host(
    steps: list[int], adopted: int
) -> None:
    there, here, taken = HiddenStates(shared=True), HiddenStates(shared=True), 0
    length = adopted * BLOCK_SIZE
    for block in range(adopted):
        there.adopt(on_device(states_of_block(block)))
        here.adopt(states_of_block(block))
    for i, count in enumerate(steps):
        states = states_of(range(length, length + count))
        there.add(length, on_device(states), unsent=True)
        here.add(length, states, unsent=True)
        for block in range(length // BLOCK_SIZE, (length + count) // BLOCK_SIZE):
            assert np.array_equal(bits(there.of_block(block)), states_of_block(block))
            assert np.array_equal(bits(here.of_block(block)), states_of_block(block))
        length += count
        if i in (len(steps) // 2, len(steps) - 1):
            for states_left in (there.take(), here.take()):
                assert np.array_equal(bits(states_left), states_of(range(taken, length)))
            taken = length
    assert not len(there.take()) and here.take().shape == (0, 0, 0)


def states_of_block(block: int) -> HostStates:
    return states_of(range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE))


def on_device(states: HostStates) -> Tensor:
    return torch.from_numpy(states).view(torch.bfloat16)


def bits(states: object) -> object:
    return states.view(torch.uint16).numpy() if isinstance(states, Tensor) else states


def test_what_a_resting_head_is_not_sent_does_not_hold_what_a_round_gathered_for_all_requests() -> None:
    features, rounds = HiddenStates(shared=False), list[weakref.ref[Tensor]]()
    for position in range(300):
        gathered = torch.full((32, 2, 3), float(position))
        rounds.append(weakref.ref(gathered))
        features.add(position, gathered[:1], unsent=True)
        del gathered
    assert sum(one() is not None for one in rounds) < 64
    taken = features.take()
    assert isinstance(taken, Tensor) and taken[:, 0, 0].tolist() == [*range(300)]


def test_what_is_behind_the_last_full_block_does_not_hold_the_chunk_that_it_was_read_in() -> None:
    features, chunk = HiddenStates(shared=True), torch.ones(3 * BLOCK_SIZE + 5, 2, 3)
    held = weakref.ref(chunk)
    features.add(0, chunk, unsent=False)
    del chunk
    blocks = [features.of_block(index) for index in range(3)]
    assert held() is None and len(blocks) == 3
