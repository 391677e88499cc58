"""Prefixes of models with states: found up to their last snapshot, in a pool without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.batch import BLOCK_SIZE, Segment
from engine.core.errors import OutOfBlocks
from engine.core.kv_shape import KVShape
from engine.core.state_shape import StateShape
from engine.files.cache_folder import CacheFolder
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from engine.model.runner import Runner
from engine.model.state_pool import SPACING, StatePool

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
        cache.state.pool.states[slot, 0] = (cache.length + end) % 256
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


def snapshots(pool: KVPool) -> int:
    assert pool.layer_states is not None
    return len(pool.layer_states._snapshots)


def read_and_answered(pool: KVPool, text: list[int], prompt: int) -> KVCache:
    """The cache of a request that read its prompt in chunks, and decoded what follows."""
    cache = adopted(pool, text[: prompt - 1])
    while cache.length < prompt:
        read(cache, min(512, prompt - cache.length), text)
    while cache.length < len(text):
        read(cache, min(3, len(text) - cache.length), text)
    return cache


def read_again(pool: KVPool, text: list[int], shared: int) -> int:
    """How many of the tokens that a text shares with an earlier one are read again."""
    cache = adopted(pool, text[:shared] + [-1] * 30)
    assert cache.length == position_of(cache) % 256 + cache.length // 256 * 256
    length = cache.length
    cache.release()
    return shared - length


def test_the_state_at_the_end_of_a_text_outlives_a_restart(tmp_path: Path) -> None:
    """Blocks alone are of no use without it."""
    for length in (0, 64):
        folder, pool = CacheFolder(tmp_path, 1 << 30), new_pool()
        pool.save_to(folder, b"model")
        cache = adopted(pool)
        assert cache.length == length and (length == 0 or position_of(cache) == length)
        read(cache, 70 - length)
        cache.release()
        folder.close()


@pytest.mark.parametrize("ended", [False, True])
def test_wherever_a_turn_parts_from_an_earlier_text_it_reads_little_of_it_again(ended: bool) -> None:
    """At most twice what follows in the earlier text, counted from the end of its prompt or of its answer, and never
    more than the spacing of snapshots.
    """
    text, prompt = list(range(17_000)), 15_000
    pool = new_pool(blocks=1_100, slots=64)
    cache = read_and_answered(pool, text, prompt)
    if ended:
        cache.release()
    for shared in [*range(16, len(text), 101), *range(prompt - 64, prompt), *range(len(text) - 64, len(text))]:
        behind = min(end - shared for end in (prompt, len(text)) if end >= shared)
        assert 0 <= read_again(pool, text, shared) < min(SPACING, 2 * behind) + 2 * BLOCK_SIZE
    assert snapshots(pool) < 2 + len(text) / SPACING + 2 * np.log2(SPACING / BLOCK_SIZE)


def test_a_request_finds_what_another_has_read_of_a_prompt_so_far() -> None:
    text, pool = list(range(5_000)), new_pool(blocks=800, slots=64)
    cache = adopted(pool, text)
    for so_far in (500, 1_000, 1_500):
        read(cache, 500, text)
        assert 0 <= read_again(pool, text, so_far) < BLOCK_SIZE
    assert snapshots(pool) < 4, "the ends of earlier chunks are dropped"


def test_a_later_turn_thins_out_the_snapshots_of_an_earlier_one_but_for_where_prompt_and_answer_ended() -> None:
    text, pool = list(range(3_000)), new_pool(blocks=800, slots=64)
    read_and_answered(pool, text[:1_100], 1_000).release()
    earlier = snapshots(pool)
    read_and_answered(pool, text, 2_900).release()
    assert snapshots(pool) < earlier + 8
    assert [read_again(pool, text, shared) for shared in (1_000, 1_100)] == [8, 12]


def test_snapshots_along_a_text_take_the_place_of_few_that_last() -> None:
    pool = new_pool(blocks=800, slots=20)
    others = [[*range(1_000 * i, 1_000 * i + 32)] for i in range(1, 9)]
    for other in others:
        read_and_answered(pool, other, 32).release()
    read_and_answered(pool, [*range(10_000, 12_100)], 2_030).release()
    assert [adopted(pool, [*other, -1]).length for other in others].count(32) >= 6


def test_where_slots_are_short_the_place_where_prompts_part_gets_one() -> None:
    pool, common = new_pool(blocks=800, slots=4), [*range(160)]
    for i in (1, 2):
        read_and_answered(pool, [*common, *range(1_000 * i, 1_000 * i + 900)], 1_060).release()
    assert adopted(pool, [*common, -1]).length == 160


def test_a_text_that_nobody_else_may_find_takes_one_snapshot() -> None:
    pool = new_pool(blocks=800, slots=64)
    cache = KVCache(pool)
    read(cache, 9_000, list(range(9_000)))
    assert snapshots(pool) == 1


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
