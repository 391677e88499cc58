from __future__ import annotations

import torch

from engine.kv_cache import KVCache
from engine.target import Target
from engine.tree import TokenTree


def write(cache: KVCache, values: list[float]) -> None:
    """One forward's worth of entries, each filled with its value."""
    states = torch.tensor(values).view(1, 1, -1, 1).expand(1, 2, -1, 4).contiguous()
    for layer in range(len(cache.layers)):
        cache.update(states, -states, layer)


def test_commit_keeps_the_path_and_nothing_else() -> None:
    cache = KVCache(layers=2, capacity=20)
    write(cache, [1, 2, 3])
    cache.commit(range(3))
    write(cache, [10, 11, 12, 13, 14])
    cache.commit([0, 2, 4])
    assert cache.length == 6
    assert cache.keys is not None and cache.values is not None
    for layer in range(2):
        assert cache.keys[layer, 0, 1, :6, 0].tolist() == [1, 2, 3, 10, 12, 14]
        assert cache.values[layer, 0, 0, :6, 3].tolist() == [-1, -2, -3, -10, -12, -14]


def test_entries_not_committed_are_overwritten_by_the_next_forward() -> None:
    cache = KVCache(layers=1, capacity=10)
    write(cache, [1, 2, 3])
    cache.commit([0])
    write(cache, [7])
    cache.commit([0])
    assert cache.keys is not None
    assert cache.keys[0, 0, 0, :2, 0].tolist() == [1, 7]


def test_nothing_is_reallocated_while_decoding(tiny: str) -> None:
    target = Target.load(tiny)
    cache = target.new_cache(120)
    target.prefill(cache, [5, 6, 7])
    assert cache.keys is not None and cache.values is not None
    before = cache.keys.data_ptr(), cache.values.data_ptr()
    for token in range(20):
        target.verify(cache, TokenTree.from_lists([token, 1, 2, 3], [-1, 0, 0, 2], [1, 0.5, 0.5, 0.5]))
        cache.commit([0, 2, 3])
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == before
    assert cache.length == 63
