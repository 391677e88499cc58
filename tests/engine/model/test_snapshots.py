"""Prefixes of models with states: found up to their last snapshot, in a pool without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.errors import OutOfBlocks
from engine.core.kv_shape import KVShape
from engine.core.state_shape import StateShape
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.runner import Runner
from engine.model.state_pool import StatePool

TEXT = list(range(100))


def new_pool(blocks: int = 32, slots: int = 8) -> KVPool:
    states = StatePool(StateShape((64,), (8,)), slots)
    return KVPool(KVShape(1, 1, 16, torch.float32), blocks, layer_states=states)


def read(cache: KVCache, count: int, text: list[int] = TEXT) -> None:
    """What a forward, its commit and `cache_blocks` do for the next tokens of a text; the state's first byte tells
    where it is then.
    """
    assert cache.state is not None
    cache.reserve(cache.length + count)
    tokens = np.asarray(text[cache.length : cache.length + count], np.int32)
    rows = cache.state.rows(Segment(tokens, None, cache, cache.length))
    for end, slot in zip(rows.ends, rows.slots[1:], strict=True):
        cache.state.pool.states[slot, 0] = cache.length + end
    cache.state.end()
    cache.commit(range(count))
    cache.cache_blocks(text)


def adopted(pool: KVPool, text: list[int] = TEXT) -> KVCache:
    cache = KVCache(pool)
    cache.match_prefix(text)
    return cache


def position_of(cache: KVCache) -> int:
    assert cache.state is not None
    return int(cache.state.pool.states[cache.state.slot, 0])


def test_a_prefix_is_served_up_to_its_last_snapshot_with_the_state_there() -> None:
    pool = new_pool()
    read(KVCache(pool), 70)
    cache = adopted(pool)
    assert cache.length == position_of(cache) == 64 and len(cache.block_table) == 4
    other = adopted(pool, TEXT[:50] + [5] * 30)
    assert other.length == 0 and len(other.block_table) == 0, "there is no snapshot so early"


def test_the_place_where_a_prompt_parts_from_another_gets_a_snapshot() -> None:
    pool, parting = new_pool(), TEXT[:50] + [5] * 30
    read(KVCache(pool), 70)
    read(adopted(pool, parting), 80, parting)
    third = adopted(pool, TEXT[:50] + [6] * 30)
    assert third.length == position_of(third) == 48


def test_a_request_that_grows_leaves_two_snapshots() -> None:
    pool = new_pool()
    cache = adopted(pool, TEXT[:40])
    assert pool.layer_states is not None
    for _ in range(10):
        read(cache, 10)
    assert len(pool.layer_states._snapshots) == 2
    assert [adopted(pool, TEXT[:end]).length for end in (40, 100)] == [32, 96]


def test_a_snapshot_goes_with_the_block_that_its_text_ends() -> None:
    pool = new_pool(blocks=5)
    first = KVCache(pool)
    read(first, 70)
    first.release()
    assert pool.layer_states is not None and len(pool.layer_states._snapshots) == 1
    other = KVCache(pool)
    other.reserve(5 * BLOCK_SIZE)
    assert not pool.layer_states._snapshots


def test_a_request_does_not_write_to_a_state_that_others_found() -> None:
    pool = new_pool()
    read(KVCache(pool), 64)
    caches = [adopted(pool) for _ in range(3)]
    for cache in caches:
        read(cache, 10)
    assert position_of(adopted(pool)) == 64
    assert [position_of(cache) for cache in caches] == [74] * 3


def test_without_a_free_slot_a_prefix_is_found_and_its_snapshot_is_kept() -> None:
    pool = new_pool(slots=3)
    read(KVCache(pool), 70)
    assert adopted(pool).length == 64


def test_a_block_that_is_not_finite_shares_no_snapshot_behind_it_and_harms_no_later_round() -> None:
    pool = new_pool()
    cache = adopted(pool)
    cache.reserve(BLOCK_SIZE)
    pool.keys[0, int(cache.block_table[0]), 0, 0, 0] = torch.nan
    for _ in range(3):
        read(cache, 20)
    assert pool.layer_states is not None and not pool.layer_states._snapshots
    cache.release()
    assert pool.layer_states.has_free(pool.layer_states.slots)


def test_blocks_beyond_the_last_snapshot_are_not_touched() -> None:
    """They stay in the order in which they were used: of a text the end is forgotten first."""
    pool = new_pool(blocks=10)
    first = KVCache(pool)
    read(first, 100)
    first.release()
    idle = list(pool._idle)
    assert adopted(pool, TEXT[:50] + [5] * 30).length == 0
    assert list(pool._idle) == idle


def test_a_prefix_is_searched_again_only_when_there_is_a_new_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = new_pool(), list[tuple[int, ...]]()
    parting = TEXT[:50] + [5] * 30
    read(KVCache(pool), 70)
    number = pool.number
    monkeypatch.setattr(pool, "number", lambda key, states: (asked.append(key.tokens), number(key, states))[1])
    cache = adopted(pool, parting)
    searched = len(asked)
    cache.match_prefix(parting)
    assert searched == 4 == len(asked), "three blocks are known, the fourth is not"
    read(KVCache(pool), 48)
    cache.match_prefix(parting)
    assert cache.length == 48


def test_a_cache_that_gets_no_state_leaves_no_block_taken() -> None:
    pool = new_pool(slots=1)
    assert pool.layer_states is not None
    runner = Runner(None, pool, 100, torch.float32)  # type: ignore[arg-type]
    held = runner.new_cache(3 * BLOCK_SIZE)
    with pytest.raises(OutOfBlocks):
        runner.new_cache(3 * BLOCK_SIZE)
    assert pool.free == pool.blocks - 3
    held.release()
    assert pool.free == pool.blocks and pool.layer_states.has_free()
