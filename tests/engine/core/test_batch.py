"""Segments and batches against a naive definition: every row with its path."""

from __future__ import annotations

import random
from itertools import chain, pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.batch import BLOCK_SIZE, Batch, BatchAddresses, Segment
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from tests.engine.core.test_tree import trees

SHAPE = KVShape(1, 1, 16, torch.float32)


def cache_of(pool: KVPool, past: int, rows: int) -> KVCache:
    cache = KVCache(pool)
    cache.reserve(past + rows)
    cache.length = past
    return cache


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """Trees, some of whose first nodes were done before, and chunks of text, of requests in one pool."""
    pool = KVPool(SHAPE, 64)
    random.Random(draw(st.integers(0, 9))).shuffle(pool._free)
    made: list[Segment] = []
    for _ in range(draw(st.integers(1, 4))):
        past = draw(st.integers(0, 40))
        if draw(st.booleans()):
            rows = draw(st.integers(1, 40))
            cache = cache_of(pool, past, rows)
            made.append(Segment.of_text(list(range(rows)), cache, draw(st.sampled_from(["all", "last", "none"]))))
        else:
            tree: TokenTree = draw(trees())
            first = draw(st.integers(0, len(tree) - 1))
            made.append(Segment.of_tree(tree, cache_of(pool, past, len(tree)), first))
    return made


def paths(segment: Segment) -> list[list[int]]:
    """For each row, the places in the request's slots that it sees, in the order of positions."""
    if segment.tree is None:
        return [list(range(segment.past + row + 1)) for row in range(len(segment))]
    nodes = range(segment.pending, len(segment.tree))
    return [[*range(segment.past), *(segment.past + node for node in segment.tree.path(at))] for at in nodes]


@given(segments())
def test_the_flat_arrays_say_of_each_row_what_its_segment_says(made: list[Segment]) -> None:
    batch, row, chosen = Batch.of(made), 0, []
    for segment, (start, end) in zip(made, batch.spans, strict=True):
        assert (start, end) == (row, row + len(segment))
        wanted = {"all": range(start, end), "last": [end - 1], "none": []}[segment.wanted]
        chosen += list(wanted)
        table = segment.cache.block_table
        for i, seen in enumerate(paths(segment)):
            place = segment.past + segment.pending + i
            ancestors = batch.ancestor_slots[batch.ancestor_ptr[row] : batch.ancestor_ptr[row + 1]]
            assert [*range(batch.prefix_lens[row]), *ancestors] == seen
            assert batch.tokens[row] == segment.tokens[i]
            assert batch.positions[row] == len(seen) - 1
            assert batch.slots[row] == table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            assert np.array_equal(batch.tables[batch.table_of[row] :][: len(table)], table)
            row += 1
    assert len(batch) == row and batch.chosen.tolist() == chosen
    assert batch.wanted == len(chosen)
    arrays = [getattr(batch, name) for name in BatchAddresses._fields[:-1]]
    assert [*chain.from_iterable(arrays)] == batch.numbers and {array.dtype for array in arrays} == {np.dtype("i4")}
    assert batch.reach == 1 + batch.positions.max()
    assert batch.vocabulary == range(batch.tokens.min(), batch.tokens.max() + 1)


@given(segments(), st.integers(1, 12))
def test_tiles_cover_all_rows_and_none_holds_rows_of_two_requests(made: list[Segment], size: int) -> None:
    batch = Batch.of(made)
    tiles = batch.tiles(size)
    assert {type(row) for row in tiles} == {int}
    assert tiles[0] == 0 and tiles[-1] == len(batch)
    assert len(tiles) == 1 + sum(-(-len(segment) // size) for segment in made)
    for first, end in pairwise(tiles):
        assert 0 < end - first <= size
        assert sum(start < end and first < stop for start, stop in batch.spans) == 1
    for start, stop in batch.spans:
        sizes = [end - first for first, end in pairwise(tiles) if start <= first < stop]
        assert max(sizes) - min(sizes) <= 1, "threads share tiles"


def test_of_a_text_the_last_row_is_wanted_and_of_a_tree_all_unless_told_otherwise() -> None:
    cache, tree = cache_of(KVPool(SHAPE, 4), 3, 3), TokenTree.from_lists([7, 8, 9], [-1, 0, 0], [1.0] * 3)
    assert Batch.of([Segment.of_text([7, 8, 9], cache)]).chosen.tolist() == [2]
    assert Batch.of([Segment.of_text([7, 8, 9], cache, "none")]).chosen.tolist() == []
    assert Batch.of([Segment.of_tree(tree, cache)]).chosen.tolist() == [0, 1, 2]


def test_a_batch_knows_the_segments_that_it_was_made_of() -> None:
    cache = cache_of(KVPool(SHAPE, 4), 3, 3)
    made = [Segment.of_text([7, 8, 9], cache), Segment.of_text([7], cache)]
    assert [*Batch.of(iter(made)).segments] == made
