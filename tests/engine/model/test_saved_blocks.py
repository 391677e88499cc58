from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from engine.core.batch import BLOCK_SIZE
from engine.core.hidden_states import States
from engine.core.kv_shape import KVShape
from engine.core.state_shape import StateShape
from engine.files.cache_folder import CacheFolder
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import BlockKey, KVPool
from engine.model.saved.blocks import SavedBlocks
from engine.model.state_pool import EMPTY, StatePool

BLOCKS = 8
TEXT = list(range(3 * BLOCK_SIZE + 5))
IDENTITY = b"model and kernels"
SHAPES = [
    KVShape(2, 3, 24, torch.float32),
    KVShape(2, 3, 24, torch.bfloat16),
    KVShape(2, 3, 24, torch.bfloat16, vnni=True),
    KVShape(2, 3, 24, torch.bfloat16, q8_0=True),
]


@contextmanager
def saving_pool(folder: Path, shape: KVShape = SHAPES[0], identity: bytes = IDENTITY) -> Iterator[KVPool]:
    """A pool with a cache folder, in which all is written when the block ends."""
    pool, cache = KVPool(shape, BLOCKS), CacheFolder(folder, 1 << 30)
    pool.save_to(cache, identity)
    yield pool
    cache.close()


def read(pool: KVPool, text: list[int], tenant: str = "") -> KVCache:
    """Adopt what is known of the text and fill in the rest with random numbers, as if it had been computed."""
    cache = KVCache(pool, tenant)
    cache.match_prefix(text)
    cache.reserve(len(text))
    for block in cache.block_table[cache.length // BLOCK_SIZE :].tolist():
        pool.keys[:, block], pool.values[:, block] = (
            (100 * torch.rand(part[:, 0].shape)).to(part.dtype) for part in (pool.keys, pool.values)
        )  # bytes below 100 are no infinite scales
    cache.length = len(text)
    cache.cache_blocks(text)
    return cache


def adopted(pool: KVPool, text: list[int], tenant: str = "") -> KVCache:
    cache = KVCache(pool, tenant)
    cache.match_prefix(text)
    return cache


def bits(cache: KVCache, blocks: int = 3) -> list[bytes]:
    parts = (cache.pool.keys, cache.pool.values)
    return [part[:, cache.block_table[:blocks].tolist()].float().numpy().tobytes() for part in parts]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_next_process_finds_the_same_bits(tmp_path: Path, shape: KVShape) -> None:
    with saving_pool(tmp_path, shape) as pool:
        written = bits(read(pool, TEXT))
    with saving_pool(tmp_path, shape) as pool:
        pool.allocate(2)  # so that the blocks have other places
        cache = adopted(pool, TEXT)
        assert cache.length == 3 * BLOCK_SIZE and bits(cache) == written


def test_a_text_is_found_as_far_as_it_is_the_same(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        read(pool, TEXT)
    with saving_pool(tmp_path) as pool:
        assert adopted(pool, [*TEXT[: 2 * BLOCK_SIZE], *reversed(TEXT)]).length == 2 * BLOCK_SIZE
        assert adopted(pool, [99, *TEXT[1:]]).length == 0
        assert adopted(pool, TEXT[BLOCK_SIZE:]).length == 0  # the same tokens at other positions


def test_the_bits_of_another_model_or_kernel_are_not_found(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        read(pool, TEXT)
    with saving_pool(tmp_path, identity=b"another") as pool:
        assert adopted(pool, TEXT).length == 0


def test_the_blocks_of_another_tenant_are_not_found(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        read(pool, TEXT, "one")
    with saving_pool(tmp_path) as pool:
        assert [adopted(pool, TEXT, tenant).length for tenant in ("", "two", "one")] == [0, 0, 3 * BLOCK_SIZE]


def test_a_tenant_finds_what_was_adopted_from_another_in_memory(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        written = bits(read(pool, TEXT, "one"))
        read(pool, TEXT, "two")
    with saving_pool(tmp_path) as pool:
        cache = adopted(pool, TEXT, "two")
        assert cache.length == 3 * BLOCK_SIZE and bits(cache) == written


def test_of_a_text_that_two_have_computed_at_once_both_find_the_block_that_stays(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        first, second = KVCache(pool, "one"), KVCache(pool, "two")
        for cache in (first, second):
            cache.reserve(BLOCK_SIZE)
            cache.length = BLOCK_SIZE
        pool.keys[:, first.block_table.tolist()] = 1.0
        for cache in (first, second):
            cache.cache_blocks(TEXT)
        second.release()
        pool.keys[:, pool.allocate(1)] = 7.0  # the second one's block
    with saving_pool(tmp_path) as pool:
        cache = adopted(pool, TEXT, "two")
        assert cache.length == BLOCK_SIZE and bool((pool.keys[:, cache.block_table.tolist()] == 1.0).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_that_is_not_finite_is_not_written_nor_what_follows_it(tmp_path: Path, shape: KVShape) -> None:
    with saving_pool(tmp_path, shape) as pool:
        cache = KVCache(pool)
        cache.reserve(len(TEXT))
        cache.length = len(TEXT)
        pool.values[1, int(cache.block_table[1])].view(torch.uint8).fill_(0xFF)
        cache.cache_blocks(TEXT)
        assert adopted(pool, TEXT).length == BLOCK_SIZE
    with saving_pool(tmp_path, shape) as pool:
        assert adopted(pool, TEXT).length == BLOCK_SIZE


def test_a_block_of_an_earlier_process_that_is_not_finite_is_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, saving_pool(tmp_path) as pool:
        patch.setattr(KVPool, "finite", lambda self, blocks: [True] * len(blocks))
        cache = read(pool, TEXT)
        pool.keys[0, int(cache.block_table[1])] = torch.inf
    with saving_pool(tmp_path) as pool:
        free = pool.free
        cache = adopted(pool, TEXT)
        assert cache.length == BLOCK_SIZE and pool.free == free - 1


def test_a_prefix_that_was_evicted_from_memory_is_read_back(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        cache = read(pool, TEXT)
        written = bits(cache)
        cache.release()
        _until_written(pool, 3)
        pool.release(pool.allocate(BLOCKS))  # all are evicted
        again = adopted(pool, TEXT)
        assert again.length == 3 * BLOCK_SIZE and bits(again) == written


def test_a_block_that_is_evicted_before_it_is_written_is_left_out(tmp_path: Path) -> None:
    goes_on = Event()
    with saving_pool(tmp_path) as pool:
        assert pool.saved is not None
        pool.saved.save(bytes(32), lambda: 0 if goes_on.wait(30) else None)  # before which nothing else is written
        read(pool, TEXT).release()
        pool.keys[:, pool.allocate(BLOCKS)] = 7.0
        goes_on.set()
    with saving_pool(tmp_path) as pool:
        assert adopted(pool, TEXT).length == 0


def test_a_block_that_is_evicted_while_it_is_copied_is_not_written(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        assert pool.saved is not None
        for number, seen in enumerate(([1, None], [1, 2], [1, 1])):
            places = iter(seen)
            pool.saved.save(bytes([number] * 32), lambda places=places: next(places))
    with saving_pool(tmp_path) as pool:
        assert pool.saved is not None
        assert [pool.saved.read(bytes([number] * 32)) is not None for number in range(3)] == [False, False, True]


def test_a_block_that_was_evicted_and_computed_anew_is_not_the_one_that_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place may have held another text in between, while it was copied."""
    with saving_pool(tmp_path) as pool:
        blocks: list[Callable[[], int | None]] = []
        monkeypatch.setattr(pool.saved, "save", lambda _, block: blocks.append(block))
        cache = read(pool, TEXT)
        assert [block() for block in blocks] == cache.block_table[:3].tolist()
        cache.release()
        pool.release(pool.allocate(BLOCKS))
        cache = read(pool, TEXT)
        assert [block() for block in blocks] == [None] * 3 + cache.block_table[:3].tolist()


def test_a_cache_that_was_released_finds_and_writes_another_text_from_its_beginning(tmp_path: Path) -> None:
    other = TEXT[::-1]
    with saving_pool(tmp_path) as pool:
        cache = read(pool, TEXT)
        cache.release()
        assert cache.match_prefix(other) == [] and cache.length == 0
        cache.reserve(len(other))
        cache.length = len(other)
        cache.cache_blocks(other)
    with saving_pool(tmp_path) as pool:
        assert [adopted(pool, text).length for text in (other, TEXT)] == [3 * BLOCK_SIZE] * 2


def test_without_a_free_block_nothing_is_read_back(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        read(pool, TEXT)
    with saving_pool(tmp_path) as pool:
        taken = pool.allocate(BLOCKS - 2)
        cache = adopted(pool, TEXT)
        assert cache.length == 2 * BLOCK_SIZE and pool.free == 0
        pool.release(taken)
        cache.match_prefix(TEXT)
        assert cache.length == 3 * BLOCK_SIZE


def test_a_block_that_is_not_there_evicts_none(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        read(pool, TEXT).release()
        pool.allocate(BLOCKS - 3)
        adopted(pool, TEXT[::-1])
        assert len(pool._known) == 3


def test_a_file_cut_at_fifty_places_is_computed_anew_and_written_again(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        cache = read(pool, TEXT)
        first, second = bits(cache, 1), tmp_path / "blocks" / f"{cache._keys[2].hex()}.talon"
    whole = second.read_bytes()
    for length in torch.randperm(len(whole))[:50].tolist():
        second.write_bytes(whole[:length])
        with saving_pool(tmp_path) as pool:
            cache = adopted(pool, TEXT)
            assert cache.length == BLOCK_SIZE and bits(cache, 1) == first
    with saving_pool(tmp_path) as pool:
        anew = bits(read(pool, TEXT), 2)
    with saving_pool(tmp_path) as pool:
        assert bits(adopted(pool, TEXT), 2) == anew


def _until_written(pool: KVPool, files: int) -> None:
    assert pool.saved is not None
    pool.saved.folder.close()
    assert len(list(pool.saved.folder.folder.rglob("*.talon"))) == files


def states_of(number: int) -> States:
    return np.full((BLOCK_SIZE, 2, 4), number, np.uint16)


def read_with_states(pool: KVPool, text: list[int]) -> None:
    """Cache the text's blocks and their hidden states, as if they had been computed."""
    cache = KVCache(pool)
    cache.reserve(len(text))
    cache.length = len(text)
    cache.cache_blocks(text, states_of)


def with_states(pool: KVPool, text: list[int]) -> list[States]:
    return KVCache(pool).match_prefix(text, with_hidden_states=True)


def test_hidden_states_are_found_with_the_blocks_by_a_head_that_wants_the_same_layers(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        pool.forget_hidden_states([1, 2])
        read_with_states(pool, TEXT)
    for layers, found in (([1, 2], 3), ([1, 3], 0), ([], 0)):
        with saving_pool(tmp_path) as pool:
            pool.forget_hidden_states(layers)
            states = with_states(pool, TEXT)
            assert len(states) == found and all(np.array_equal(one, states_of(at)) for at, one in enumerate(states))
    with saving_pool(tmp_path) as pool:
        assert adopted(pool, TEXT).length == 3 * BLOCK_SIZE  # where nobody wants them


def test_hidden_states_stay_in_the_folder_until_a_head_asks_for_them(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        pool.forget_hidden_states([1, 2])
        read_with_states(pool, TEXT[:BLOCK_SIZE])
    with saving_pool(tmp_path) as pool:
        pool.forget_hidden_states([1, 2])
        block_key = BlockKey(0, tuple(TEXT[:BLOCK_SIZE]))
        assert adopted(pool, TEXT).length == BLOCK_SIZE
        assert pool.number(block_key, False) and pool.find(block_key, with_hidden_states=True) is None
        assert len(with_states(pool, TEXT)) == 1 and pool.find(block_key, with_hidden_states=True) is not None


def test_hidden_states_are_read_back_for_blocks_that_the_pool_still_has(tmp_path: Path) -> None:
    with saving_pool(tmp_path) as pool:
        pool.forget_hidden_states([1, 2])
        read_with_states(pool, TEXT[:BLOCK_SIZE])
    with saving_pool(tmp_path) as pool:
        adopted(pool, TEXT)
        pool.forget_hidden_states([1, 2])
        free = pool.free
        assert len(with_states(pool, TEXT)) == 1 and pool.free == free


def test_hidden_states_of_other_layers_than_the_blocks_were_published_with_are_not_written(tmp_path: Path) -> None:
    goes_on = Event()
    with saving_pool(tmp_path) as pool:
        assert pool.saved is not None
        pool.saved.save(bytes(32), lambda: 0 if goes_on.wait(30) else None)
        pool.forget_hidden_states([1, 2])
        read_with_states(pool, TEXT[:BLOCK_SIZE])
        pool.forget_hidden_states([1, 3])
        pool._keep_hidden_states(0, states_of(9))
        goes_on.set()
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("states", [None, StateShape((64,), (8,))], ids=["keys and values", "states too"])
def test_the_key_of_a_block_is_hashed_once_where_it_is_looked_up_found_and_noted(
    tmp_path: Path, states: StateShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pool_on(cache: CacheFolder) -> KVPool:
        layer_states = None if states is None else StatePool(states, 8)
        pool = KVPool(SHAPES[0], BLOCKS, layer_states=layer_states)
        pool.save_to(cache, IDENTITY)
        return pool

    cache = CacheFolder(tmp_path, 1 << 30)
    read(pool_on(cache), TEXT)
    cache.close()
    cache, hashed, next_key = CacheFolder(tmp_path, 1 << 30), list[bytes](), SavedBlocks.next_key
    monkeypatch.setattr(
        SavedBlocks, "next_key", lambda self, *given: hashed.append(next_key(self, *given)) or hashed[-1]
    )
    monkeypatch.setattr(StatePool, "has", lambda *_: True)  # as if a snapshot were at the end of every block
    monkeypatch.setattr(KVCache, "_snapshot", lambda *_: EMPTY)
    assert adopted(pool_on(cache), TEXT).length == 3 * BLOCK_SIZE
    cache.close()
    assert len(hashed) == len(set(hashed)) == 3
