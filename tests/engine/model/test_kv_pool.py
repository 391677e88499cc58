from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.batch import BLOCK_SIZE
from engine.core.errors import OutOfBlocks
from engine.core.hidden_states import States
from engine.core.kv_shape import KVShape
from engine.model.kv_cache import KVCache, commit_all
from engine.model.kv_part import move_by_index
from engine.model.kv_pool import BlockKey, KVPool
from tests.engine.kernels.pool_layout import contents, fill, in_codes, padded

BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Requests come, grow, share and go, in any order."""

    @initialize()
    def start(self) -> None:
        self.pool = KVPool(KVShape(1, 1, 8, torch.float32), BLOCKS)
        self.holders: list[list[int]] = []
        self.caches: list[KVCache] = []

    @rule(positions=st.integers(0, 5 * BLOCK_SIZE), data=st.data())
    def reserve(self, positions: int, data: st.DataObject) -> None:
        if not self.caches or data.draw(st.booleans()):
            self.caches.append(KVCache(self.pool))
        cache = data.draw(st.sampled_from(self.caches))
        free, before = self.pool.free, cache.block_table.tolist()
        missing = -(-positions // BLOCK_SIZE) - len(before)
        if missing > free:
            with pytest.raises(OutOfBlocks):
                cache.reserve(positions)
            assert self.pool.free == free and cache.block_table.tolist() == before
        else:
            cache.reserve(positions)
            assert cache.block_table.tolist()[: len(before)] == before and cache.capacity >= positions

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.caches)).block_table.tolist()
        for block in blocks:
            block_key = BlockKey(0, (block,) * BLOCK_SIZE)
            self.pool.cache_block(block_key, block)
            assert self.pool.find(block_key) is not None
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache = data.draw(st.sampled_from(self.caches))
        cache.release()
        cache.release()  # harmless
        self.caches.remove(cache)

    @invariant()
    def no_block_is_lost_or_given_twice(self) -> None:
        tables = [block for cache in self.caches for block in cache.block_table.tolist()]
        assert len(tables) == len(set(tables))
        held = Counter(tables + [block for blocks in self.holders for block in blocks])
        assert self.pool.free == BLOCKS - len(held)
        assert [self.pool._references[block] for block in range(BLOCKS)] == [held[block] for block in range(BLOCKS)]


Blocks.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
test_blocks_are_neither_lost_nor_given_twice = Blocks.TestCase


@settings(deadline=None)
@given(
    st.permutations(range(BLOCKS)),
    st.integers(0, 60),
    st.sets(st.integers(0, 39), min_size=1),
    st.sampled_from([(torch.float32, ""), (torch.bfloat16, ""), (torch.bfloat16, "vnni"), (torch.bfloat16, "q8_0")]),
    st.sampled_from([8, 16, 24, 64]),
)
def test_commit_keeps_the_paths_keys_and_values_in_order_whatever_the_table(
    table: list[int], past: int, nodes: set[int], kind: tuple[torch.dtype, str], head_dim: int
) -> None:
    (dtype, layout), (layers, heads) = kind, (2, 3)
    pool = KVPool(KVShape(layers, heads, head_dim, dtype, layout == "vnni", layout == "q8_0"), BLOCKS)
    pool._free = list(table)
    cache, path = KVCache(pool), sorted(nodes)
    cache.reserve(past + 40)
    cache.length = past
    # keys hold their slot's place in the text, values its negative, plus the dimension's and the layer's share
    parts = torch.arange(head_dim) / 32 + torch.tensor([0.0, 0.5])[:, None]
    entries = torch.zeros(layers, BLOCKS, heads, BLOCK_SIZE, pool.shape.dims, dtype=dtype)
    for place in range(past + 40):
        block, lane = int(cache.block_table[place // BLOCK_SIZE]), place % BLOCK_SIZE
        entries[:, block, :, lane, :head_dim] = (place % 7 + parts)[:, None].to(dtype)
    fill(pool, entries, -entries)
    cache.pending = 40
    cache.commit(path)
    assert (cache.length, cache.pending) == (past + len(path), 0)
    keys, values = contents(pool)
    for place, source in enumerate([*range(past), *(past + node for node in path)]):
        block, lane = int(cache.block_table[place // BLOCK_SIZE]), place % BLOCK_SIZE
        expected = (source % 7 + parts)[:, None].to(dtype).expand(layers, heads, head_dim)
        if layout == "q8_0":
            expected = in_codes(padded(expected, pool.shape))[..., :head_dim]
        assert torch.equal(keys[:, block, :, lane, :head_dim], expected)
        assert torch.equal(values[:, block, :, lane, :head_dim], -expected)


@pytest.mark.parametrize("kind", [(torch.float32, ""), (torch.bfloat16, "vnni"), (torch.bfloat16, "q8_0")])
def test_paths_of_many_requests_are_committed_at_once_as_one_by_one(kind: tuple[torch.dtype, str]) -> None:
    """With paths that are in place, empty, all of their tree, and of one node."""
    dtype, layout = kind
    shape, lengths = KVShape(2, 3, 32, dtype, layout == "vnni", layout == "q8_0"), (0, 5, 15, 16, 20)
    paths = [[0, 2, 5], [0, 1, 2], [], [3], [0, 1, 2, 4, 5]]
    pools = [KVPool(shape, BLOCKS) for _ in range(2)]
    entries = torch.randn(2, BLOCKS, 3, BLOCK_SIZE, shape.dims).to(dtype)
    caches = []
    for pool in pools:
        fill(pool, entries, -entries)
        caches.append([KVCache(pool) for _ in paths])
        for cache, length in zip(caches[-1], lengths, strict=True):
            cache.reserve(length + 9)
            cache.length, cache.pending = length, 6
    for cache, path in zip(caches[0], paths, strict=True):
        cache.commit(path)
    moved: list[int] = []
    move = pools[1].move
    pools[1].move = lambda sources, places: (moved.append(len(sources)), move(sources, places))  # type: ignore
    commit_all(list(zip(caches[1], paths, strict=True)))
    assert moved == [2 + 1 + 2]
    assert torch.equal(pools[0].keys, pools[1].keys) and torch.equal(pools[0].values, pools[1].values)
    for cache in caches[0]:
        cache.commit([1, 2])
    commit_all([(cache, [1, 2]) for cache in caches[1][:2]])
    commit_all([(cache, [1, 2]) for cache in caches[1][2:]])
    assert moved[1:] == [4, 6]
    assert torch.equal(pools[0].keys, pools[1].keys) and torch.equal(pools[0].values, pools[1].values)
    assert [(cache.length, cache.pending) for cache in caches[1]] == [(5, 0), (10, 0), (17, 0), (19, 0), (27, 0)]


def test_a_pool_has_a_part_for_each_shape_of_keys_and_moves_all_of_them() -> None:
    shapes = [KVShape(2, 1, 16, torch.float32), KVShape(1, 2, 32, torch.float32)]
    pool = KVPool(shapes, BLOCKS)
    assert [part.shape for part in pool.parts] == shapes
    assert pool.block_bytes == sum(shape.block_bytes for shape in shapes) == 2 * 4 * BLOCK_SIZE * (2 * 16 + 2 * 32)
    for part in pool.parts:
        part.keys[:, 1], part.values[:, 1] = 3.0, 4.0
    pool.move(np.arange(BLOCK_SIZE, dtype=np.int32) + BLOCK_SIZE, np.arange(BLOCK_SIZE, dtype=np.int32))
    for part in pool.parts:
        assert torch.equal(part.keys[:, 0], part.keys[:, 1]) and torch.equal(part.values[:, 0], part.values[:, 1])
    with pytest.raises(ValueError, match="unpack"):
        _ = pool.part


def test_what_is_in_place_is_not_moved() -> None:
    pool = KVPool(KVShape(1, 1, 8, torch.float32), 4)
    pool.move = None  # type: ignore
    caches = [KVCache(pool), KVCache(pool)]
    commit_all([(caches[0], [0, 1]), (caches[1], [])])
    assert [cache.length for cache in caches] == [2, 0]


def test_slots_are_moved_by_index_as_the_kernel_moves_them() -> None:
    shape = KVShape(2, 2, 24, torch.float32)
    pools = [KVPool(shape, 6) for _ in range(2)]
    for mine, other in ((pools[0].keys, pools[1].keys), (pools[0].values, pools[1].values)):
        other.copy_(mine.normal_())
    sources, places = np.array([35, 38, 93, 17], np.int32), np.array([34, 35, 36, 80], np.int32)
    pools[0].move(sources, places)
    move_by_index(pools[1].keys, pools[1].values, sources, places)
    assert torch.equal(pools[0].keys, pools[1].keys) and torch.equal(pools[0].values, pools[1].values)


def test_slots_of_a_pool_made_in_inference_mode_are_moved_outside_of_it() -> None:
    with torch.inference_mode():
        pool = KVPool(KVShape(1, 1, 8, torch.float32), 2)
        keys, values = pool.keys.normal_().clone(), pool.values.normal_().clone()
    move_by_index(keys, values, np.array([3], np.int32), np.array([1], np.int32))
    assert torch.equal(keys[:, 0, ..., 1], keys[:, 0, ..., 3])


def test_a_pool_on_a_device_moves_there() -> None:
    pool = KVPool(KVShape(1, 1, 8, torch.float32), 2, torch.device("meta"))
    assert pool.keys.device == pool.values.device == torch.device("meta")
    pool.move(np.array([1], np.int32), np.array([0], np.int32))


def test_taking_more_than_there_is_names_the_key_and_takes_nothing() -> None:
    pool = KVPool(KVShape(1, 1, 8, torch.float32), 2)
    with pytest.raises(OutOfBlocks, match=r"verifier\.kv_memory: 3 more blocks are needed and 2 are free"):
        KVCache(pool).reserve(3 * BLOCK_SIZE)
    assert pool.free == 2


def test_a_released_cache_serves_another_request() -> None:
    pool = KVPool(KVShape(1, 1, 8, torch.float32), 2)
    one, other = KVCache(pool), KVCache(pool)
    one.reserve(2 * BLOCK_SIZE)
    one.release()
    other.reserve(2 * BLOCK_SIZE)
    assert np.unique(other.block_table).tolist() == [0, 1] and one.capacity == 0


def pool_of(blocks: int) -> KVPool:
    return KVPool(KVShape(1, 1, 8, torch.float32), blocks)


def text_of(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * BLOCK_SIZE))


def read(pool: KVPool, text: list[int]) -> KVCache:
    """A request whose text has been forwarded."""
    cache = KVCache(pool)
    cache.match_prefix(text)
    cache.reserve(len(text))
    cache.length = len(text)
    cache.cache_blocks(text)
    return cache


def test_what_was_not_used_for_longest_is_forgotten_first() -> None:
    pool = pool_of(3)
    texts = [text_of(1, 100 * i) for i in range(3)]
    for text in texts:
        read(pool, text).release()
    read(pool, texts[0]).release()  # used again, so the second is now the oldest
    read(pool, text_of(1, 900)).release()
    known = [KVCache(pool) for _ in texts]
    for cache, text in zip(known, texts, strict=True):
        cache.match_prefix(text)
    assert [cache.length for cache in known] == [BLOCK_SIZE, 0, BLOCK_SIZE]


def test_a_block_is_looked_up_where_it_begins_and_the_text_fills_it() -> None:
    cache, text = KVCache(pool_of(4)), text_of(2)
    assert cache.next_block_key(text[: BLOCK_SIZE - 1]) is None
    assert cache.next_block_key(text[:BLOCK_SIZE]) == (0, tuple(text[:BLOCK_SIZE]))
    cache.reserve(BLOCK_SIZE + 1)
    cache.length = BLOCK_SIZE + 1
    assert cache.next_block_key(text_of(4)) is None


def test_a_text_read_in_steps_is_published_block_by_block_and_each_once() -> None:
    pool, text = pool_of(8), text_of(3)
    cache = KVCache(pool)
    for length in (5, BLOCK_SIZE, BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE):
        cache.reserve(length)
        cache.length = length
        cache.cache_blocks(text[:length])
    assert cache.next_block_key(text + text_of(1, 500)) == (3, tuple(text_of(1, 500)))
    again = KVCache(pool)
    again.match_prefix(text)
    assert again.block_table.tolist() == cache.block_table.tolist()


def test_a_text_is_shared_up_to_its_first_block_that_is_not_finite_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has the same text computes it again; a cache that is used again shares again. What follows that block is
    not looked at in every round.
    """
    pool, text = pool_of(8), text_of(4)
    looked_at: list[int] = []
    finite = pool.finite

    def look(blocks: list[int]) -> list[bool]:
        looked_at.extend(blocks)
        return finite(blocks)

    monkeypatch.setattr(pool, "finite", look)
    cache = KVCache(pool)
    cache.reserve(len(text))
    pool.keys[0, int(cache.block_table[2]), 0, 0, 0] = torch.nan
    for length in (2 * BLOCK_SIZE, 3 * BLOCK_SIZE, 4 * BLOCK_SIZE):
        cache.length = length
        cache.cache_blocks(text[:length])
    other = KVCache(pool)
    other.match_prefix(text)
    assert other.length == 2 * BLOCK_SIZE and looked_at == cache.block_table[:3].tolist()
    cache.release()
    pool.keys.zero_()
    again, third = read(pool, text), KVCache(pool)
    third.match_prefix(text)
    assert third.block_table.tolist() == again.block_table.tolist()


def states_of(block: int) -> States:
    return np.full((BLOCK_SIZE, 1, 2), block, np.uint16)


def written(pool: KVPool, text: list[int], states: States) -> None:
    """A request of one block came, was published with these states, and went."""
    cache = KVCache(pool)
    cache.reserve(BLOCK_SIZE)
    cache.length = BLOCK_SIZE
    cache.cache_blocks(text, lambda block: states)
    cache.release()


def test_blocks_are_found_with_their_hidden_states_as_far_as_these_are_there() -> None:
    pool, text = pool_of(8), text_of(3)
    cache = KVCache(pool)
    cache.reserve(len(text))
    cache.length = len(text)
    cache.cache_blocks(text, lambda block: states_of(block) if block < 2 else None)
    head, plain = KVCache(pool), KVCache(pool)
    found = head.match_prefix(text, with_hidden_states=True)
    assert head.length == 2 * BLOCK_SIZE and np.array_equal(np.stack(found), np.stack([states_of(0), states_of(1)]))
    assert plain.match_prefix(text) == [] and plain.length == 3 * BLOCK_SIZE


def test_hidden_states_may_come_after_the_block() -> None:
    """Whoever read it first had no head; of two blocks the first stays, and gets the states of the second."""
    pool, text = pool_of(8), text_of(1)
    read(pool, text)
    second, third = KVCache(pool), KVCache(pool)
    second.match_prefix(text, with_hidden_states=True)
    assert second.length == 0
    second.reserve(BLOCK_SIZE)
    second.length = BLOCK_SIZE
    second.cache_blocks(text, states_of)
    assert np.array_equal(third.match_prefix(text, with_hidden_states=True)[0], states_of(0))


def test_hidden_states_take_a_quarter_of_the_pool_at_most_and_the_newest_stay() -> None:
    pool, texts = pool_of(8), [text_of(1, 100 * i) for i in range(4)]
    large = np.zeros((BLOCK_SIZE, 1, pool.shape.block_bytes // BLOCK_SIZE // 2), np.uint16)  # as keys and values
    for text in texts[:2]:
        written(pool, text, large)
    assert KVCache(pool).match_prefix(texts[0], with_hidden_states=True)  # used again, so the second is now the oldest
    for text in texts[2:3]:
        written(pool, text, large)
    found = [bool(KVCache(pool).match_prefix(text, with_hidden_states=True)) for text in texts]
    assert found == [True, False, True, False]
    without = KVCache(pool)
    without.match_prefix(texts[1])
    assert without.length == BLOCK_SIZE


def test_hidden_states_go_with_their_block_and_when_other_layers_are_wanted() -> None:
    pool, text, other = pool_of(1), text_of(1), text_of(1, 500)
    written(pool, text, states_of(1))
    written(pool, other, states_of(2))  # in the only block there is
    cache = KVCache(pool)
    assert np.array_equal(cache.match_prefix(other, with_hidden_states=True)[0], states_of(2))
    pool.forget_hidden_states([1])
    assert KVCache(pool).match_prefix(other, with_hidden_states=True) == []


def test_of_a_text_that_nobody_holds_the_end_is_forgotten_first() -> None:
    pool, text = pool_of(3), text_of(3)
    read(pool, text).release()
    KVCache(pool).reserve(BLOCK_SIZE)
    again = KVCache(pool)
    again.match_prefix(text)
    assert again.length == 2 * BLOCK_SIZE


def test_a_request_gives_back_its_own_block_for_one_that_is_known() -> None:
    pool, text = pool_of(6), text_of(2)
    first, second = read(pool, text), KVCache(pool)
    second.reserve(3 * BLOCK_SIZE)
    second.match_prefix(text)
    assert second.block_table[:2].tolist() == first.block_table.tolist() and second.length == 2 * BLOCK_SIZE
    assert pool.free == 6 - 2 - 1
    first.release()
    second.release()
    assert pool.free == 6


SHAPES = {
    "numbers": KVShape(2, 3, 20, torch.float32),
    "pairs": KVShape(2, 3, 40, torch.bfloat16, True),
    "codes": KVShape(2, 3, 64, torch.bfloat16, False, True),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_entries_of_slots_are_read_as_numbers_whatever_the_layout(kind: str) -> None:
    pool, slots = KVPool(SHAPES[kind], 4), torch.tensor([0, 17, 5, 63])
    entries = padded(torch.randn(2, 4, 3, BLOCK_SIZE, pool.shape.head_dim), pool.shape).to(pool.shape.dtype)
    fill(pool, entries, -entries)
    for layer in (0, 1):
        for found, whole in zip(pool.part.read(layer, slots), contents(pool), strict=True):
            expected = whole[layer, slots // BLOCK_SIZE, :, slots % BLOCK_SIZE, : pool.shape.head_dim]
            assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("kind", ["numbers", "pairs"])
def test_entries_that_are_written_to_slots_are_read_there_and_nowhere_else(kind: str) -> None:
    pool, slots = KVPool(SHAPES[kind], 4), torch.tensor([33, 2, 31])
    entries = torch.randn(2, 3, 3, pool.shape.head_dim).to(pool.shape.dtype)
    pool.part.write(1, slots, *entries)
    assert all(torch.equal(found, of) for found, of in zip(pool.part.read(1, slots), entries, strict=True))
    others = torch.tensor([slot for slot in range(4 * BLOCK_SIZE) if slot not in slots.tolist()])
    assert not any(found.any() for found in pool.part.read(1, others)) and not pool.keys[0].any()
