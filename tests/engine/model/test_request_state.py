"""Slots, kept rows and snapshots of requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.core.batch import Segment
from engine.core.errors import OutOfBlocks
from engine.core.state_shape import StateShape
from engine.core.tree import TokenTree
from engine.model.request_state import RequestState
from engine.model.state_pool import EMPTY, StatePool

TREE = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 1], [1.0] * 4)


def new_pool(slots: int = 8) -> StatePool:
    return StatePool(StateShape((64, 100), (40,)), slots)


def text(state: RequestState, past: int, tokens: int) -> Any:
    """Read that many tokens."""
    state.reserve()
    rows = state.rows(Segment(np.zeros(tokens, np.int32), None, SimpleNamespace(), past))
    state.end()
    state.commit(range(tokens), past + tokens)
    return rows


def tree(state: RequestState, past: int, path: Sequence[int] | None = None) -> Any:
    """Verify a tree, and keep a path of it if there is one."""
    state.reserve()
    rows = state.rows(Segment(TREE.tokens, TREE, SimpleNamespace(), past))
    state.end()
    if path is not None:
        state.commit(path, past + len(path))
    return rows


def test_parts_of_layers_begin_at_whole_cache_lines() -> None:
    shape = StateShape((64, 100), (40,))
    assert (shape.state_offsets, shape.slot_bytes, shape.row_bytes) == ([0, 64, 192], 192, 64)


def test_what_is_accepted_is_replayed_by_the_next_forward() -> None:
    state = RequestState(new_pool())
    text(state, 0, 5)
    first = tree(state, 5, [0, 1, 3])
    second = tree(state, 8)
    assert (first.trunk, first.slots, second.trunk) == (0, [state.slot], 3)
    assert second.kept == [first.stored[node] for node in (0, 1, 3)]
    assert second.parents == [-1, 0, 1, 2, 3, 3, 4]
    assert state.position == 8


def test_committed_rows_are_replayed_in_place_and_read_ones_elsewhere() -> None:
    state = RequestState(new_pool())
    read = text(state, 0, 5)
    assert read.slots[0] == EMPTY and read.slots[1] == state.slot
    tree(state, 5, [0])
    assert tree(state, 6).slots == [state.slot] * 2
    assert text(state, 6, 3).slots[1:] == [state.slot] and state.position == 9


def test_a_forward_that_is_not_committed_changes_nothing() -> None:
    pool = new_pool()
    state = RequestState(pool)
    text(state, 0, 5)
    slot = state.slot
    for _ in range(20):
        state.rows(Segment(np.zeros(40, np.int32), None, SimpleNamespace(), 5))
        state.end()
        tree(state, 5)
    assert (state.slot, state.position) == (slot, 5) and pool.has_free(pool.slots - 1 - 3)


def test_a_state_goes_on_only_where_it_ends() -> None:
    state = RequestState(new_pool())
    text(state, 0, 5)
    with pytest.raises(RuntimeError, match="a state after 5 positions cannot go on after 7"):
        tree(state, 7)


def test_a_part_of_what_was_read_cannot_be_committed() -> None:
    state = RequestState(new_pool())
    state.reserve()
    state.rows(Segment(np.zeros(4, np.int32), None, SimpleNamespace(), 0))
    with pytest.raises(ValueError, match="3 of a text's 4 rows"):
        state.commit(range(3), 3)


def test_a_snapshot_is_taken_at_the_last_full_block_and_where_one_is_wanted() -> None:
    state = RequestState(new_pool())
    state.wanted = {16}
    rows = text(state, 0, 70)
    assert rows.ends == [16, 64, 70] and len({*rows.slots}) == 4
    assert [(one.position, one.lasts) for one in state.saved] == [(16, True), (64, False)]
    assert text(state, 70, 10).ends == [10]
    assert [(one.position, one.lasts) for one in state.saved] == [(16, True), (80, False)]
    assert state.saved[1].slot == state.slot, "the state itself, which is then written to no more"
    tree(state, 80, [0])
    assert tree(state, 81).slots[1] != state.saved[1].slot


def test_the_slot_that_is_read_is_written_last() -> None:
    """The windows of all states that are stored are made of the one in it."""
    state = RequestState(new_pool())
    text(state, 0, 14)
    tree(state, 14, [0, 1, 3])
    own = state.slot
    rows = tree(state, 17)
    assert rows.ends == [2, 3] and rows.slots[0] == rows.slots[2] == own != rows.slots[1]


def test_without_room_there_are_no_snapshots_and_requests_go_on() -> None:
    state = RequestState(new_pool(2))
    for past in range(0, 320, 40):
        assert text(state, past, 40).ends[-1] == 40
    assert state.position == 320


def test_requests_that_need_more_states_than_there_are_raise_out_of_blocks() -> None:
    pool = new_pool(2)
    first, second = RequestState(pool), RequestState(pool)
    text(first, 0, 5)
    first.reserve()
    with pytest.raises(OutOfBlocks, match=r"verifier\.kv_memory: 2 states"):
        second.reserve()
    first.release()
    second.reserve()


def test_everything_is_returned_on_release() -> None:
    pool = new_pool()
    state = RequestState(pool)
    state.wanted = {16}
    text(state, 0, 40)
    tree(state, 40, [0, 2])
    tree(state, 42)
    state.release()
    assert pool.has_free(pool.slots) and len(pool._free_rows) == len(pool.store)


def test_the_snapshot_used_longest_ago_makes_room_and_those_in_use_stay() -> None:
    pool = new_pool(3)
    slots = [pool.take() for _ in range(3)]
    for number, slot in enumerate(slots, start=1):
        pool.keep(number, slot)
        pool.give(slot)
    used = pool.hold(slots[1])
    pool.find(1)
    assert pool.has_free(2) and not pool.has_free(3)
    assert pool.take() == slots[2] and pool.find(3) is None
    assert pool.take() == slots[0] and pool.find(1) is None
    assert pool.find(2) == used
    with pytest.raises(OutOfBlocks):
        pool.take()


def test_a_snapshot_that_is_to_last_is_not_thinned_out() -> None:
    pool = new_pool()
    for number, passing in ((1, 16), (2, None)):
        slot = pool.take()
        pool.keep(number, slot, passing)
        pool.give(slot)
    pool.thin([1, 2], newest=160, prompt_end=0)
    assert pool.find(1) is None and pool.find(2) is not None


def test_the_store_of_rows_grows_and_keeps_what_it_holds() -> None:
    pool = new_pool()
    [row] = pool.take_rows(1)
    pool.store[row] = 7
    more = pool.take_rows(500)
    assert len({row, *more}) == 501 and max(more) < len(pool.store) and (pool.store[row] == 7).all()


def test_the_pools_memory_is_that_of_its_states_and_of_its_store() -> None:
    pool = new_pool(slots=40)
    assert pool.memory == 40 * 192 + 64 * 64
    pool.take_rows(65)
    assert pool.memory == 40 * 192 + 128 * 64
