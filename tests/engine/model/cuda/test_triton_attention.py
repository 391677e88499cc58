"""The CUDA attention: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.kernels.attention.attention import Rule
from engine.model.cuda import triton_attention
from engine.model.cuda.device_rows import DeviceRows, grouped
from engine.model.cuda.padded_rows import PaddedRows
from engine.model.cuda.triton_attention import TritonAttention
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from tests.engine.model.test_target import random_tree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KV_HEADS, GROUPS = 2, 3
BF16, FP32 = torch.bfloat16, torch.float32


class Texts:
    """Requests over one pool. A key and a value are a function of a request's token and position alone, wherever they
    lie, so that the same row may be met in batches of every composition. What is not written is NaN.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype):
        self.pool = KVPool(KVShape(1, KV_HEADS, head_dim, dtype), 200)
        self.pool.keys.fill_(torch.nan)
        self.pool.values.fill_(torch.nan)
        self.head_dim, self.dtype, self.padding = head_dim, dtype, 3
        self.changes: dict[str, int] = {}  # of how attention divides its work
        self._taken = self.pool.allocate(7)  # so that blocks do not begin at 0

    def vector(self, token: int, position: int, kind: int, heads: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000003 * token + 101 * position + kind)
        return torch.randn(heads, self.head_dim, generator=generator).to(self.dtype)

    def read(self, tokens: list[int], tree: TokenTree | None = None, rows: int = 9) -> Segment:
        """A request that has read `tokens` and verifies `tree`, or reads the last of them just now."""
        cache = KVCache(self.pool)
        cache.reserve(len(tokens) + 40)
        cache.length = len(tokens) - (rows if tree is None else 0)
        for position, token in enumerate(tokens):
            self._write(cache, position, token, position)
        if tree is None:
            return Segment.of_text(tokens[-rows:], cache, "all")
        for node, (token, depth) in enumerate(zip(tree.tokens.tolist(), tree.depths.tolist(), strict=True)):
            self._write(cache, len(tokens) + node, token, len(tokens) + depth)
        return Segment.of_tree(tree, cache)

    def _write(self, cache: KVCache, slot: int, token: int, position: int) -> None:
        block, lane = int(cache.block_table[slot // BLOCK_SIZE]), slot % BLOCK_SIZE
        self.pool.keys[0, block, :, : self.head_dim, lane] = self.vector(token, position, 1, KV_HEADS)
        self.pool.values[0, block, :, lane, : self.head_dim] = self.vector(token, position, 2, KV_HEADS)

    def attend(self, segments: list[Segment], rule: Rule) -> Tensor:
        """[rows, heads, head_dim]"""
        batch = Batch.of(segments)
        rows_of = zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)
        query = torch.stack([self.vector(token, at, 3, KV_HEADS * GROUPS) for token, at in rows_of])
        pool = self.pool
        moved: Any = KVPool(pool.shape, pool.blocks)
        moved.part.keys, moved.part.values = pool.keys.to(DEVICE), pool.values.to(DEVICE)
        attention = TritonAttention(moved, GROUPS, len(batch))
        vars(attention).update(self.changes)
        for scratch in (attention._peaks, attention._totals, attention._sums):
            scratch.fill_(torch.nan)
        rows = PaddedRows.of(batch, 0, len(batch), len(batch) + self.padding, attention)
        padded = torch.cat([query, query[-1:].expand(self.padding, -1, -1)])
        found = attention(DeviceRows(*(part.to(DEVICE) for part in rows.seen)), 0, rule, padded.to(DEVICE)).cpu()
        assert not found[len(batch) :].any(), "rows that fill up see nothing"
        return found[: len(batch)]

    def expected(self, path: list[int], rule: Rule) -> Tensor:
        """[heads, head_dim] float64: what the last token of a text finds."""
        last = len(path) - 1
        first = max(0, len(path) - rule.window) if rule.window else 0
        places = range(first, len(path))
        query = self.vector(path[-1], last, 3, KV_HEADS * GROUPS).double()
        keys = torch.stack([self.vector(path[i], i, 1, KV_HEADS) for i in places]).double().repeat_interleave(GROUPS, 1)
        values = torch.stack([self.vector(path[i], i, 2, KV_HEADS) for i in places]).double()
        scores = torch.einsum("hd,khd->hk", query, keys) * rule.scale
        if rule.softcap:
            scores = rule.softcap * (scores / rule.softcap).tanh()
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double().cpu()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(places)]
        return torch.einsum("hk,khd->hd", weights, values.repeat_interleave(GROUPS, 1))


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


RULES = {
    "plain": Rule(0.2),
    "window": Rule(0.2, window=9),
    "wide window": Rule(0.2, window=40),
    "soft cap": Rule(0.5, softcap=2.0),
    "sinks": Rule(0.2, sinks=torch.linspace(-2, 3, KV_HEADS * GROUPS, device=DEVICE)),
}


@pytest.mark.parametrize(("head_dim", "dtype"), [*product([16, 40, 64, 96, 128, 256], [BF16]), (64, FP32), (256, FP32)])
def test_every_head_size_from_16_to_256_is_served(head_dim: int, dtype: torch.dtype) -> None:
    texts, prompt = Texts(head_dim, dtype), text(70, 4)
    found = texts.attend([texts.read(prompt, TokenTree.chain(1, [2], [1.0]))], Rule(head_dim**-0.5))
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    expected = texts.expected([*prompt, 1, 2], Rule(head_dim**-0.5))
    torch.testing.assert_close(found[1].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("rule", "dtype"), [("wide window", FP32), ("sinks", BF16)], ids=str)
def test_a_rows_bits_are_its_own_in_every_batch(rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read with its prompt, alone, in a tree with wrong siblings, beside longer and shorter texts, over chunks."""
    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    texts, whole, split = Texts(32, dtype), text(137, 5), 119  # the rows see from 120 to 137 positions, 128 among them
    read = texts.attend([texts.read(whole, rows=18)], RULES[rule])
    nodes, parents, spine = [whole[split]], [-1], [0]
    for token in whole[split + 1 :]:
        parent = spine[-1]
        spine.append(len(nodes) + 1)
        nodes += [(token + 1) % 128, token]
        parents += [parent, parent]
    tree = TokenTree.from_lists(nodes, parents, [1.0] * len(nodes))
    longer, shorter = texts.read(text(200, 6), TokenTree.root_only(1)), texts.read(text(9, 7), rows=2)
    in_tree = texts.attend([longer, texts.read(whole[:split], tree), shorter], RULES[rule])
    assert torch.equal(in_tree[1:][spine], read)
    for end in (120, 128, 129, 137):
        alone = texts.read(whole[: end - 1], TokenTree.root_only(whole[end - 1]))
        assert torch.equal(texts.attend([alone], RULES[rule])[0], read[end - split - 1])
        assert torch.equal(texts.attend([shorter, alone, longer], RULES[rule])[2], read[end - split - 1])


@pytest.mark.parametrize("window", [3, 9, 20])
def test_rows_whose_window_begins_among_their_ancestors_read_no_text(window: int) -> None:
    texts, prompt = Texts(32, torch.float32), text(64, 3)
    tree = TokenTree.from_lists([*range(17)], [-1, 0, 0, *range(2, 16)], [1.0] * 17)
    found = texts.attend([texts.read(prompt, tree)], Rule(0.2, window=window))
    for node in (0, 2, 9, 16):
        expected = texts.expected([*prompt, *tree.path_tokens(node)], Rule(0.2, window=window))
        torch.testing.assert_close(found[node].double(), expected, atol=1e-5, rtol=1e-5)


def test_how_rows_are_grouped_and_spread_over_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    texts = Texts(32, torch.bfloat16)
    tree = random_tree(12, text(12, 1), random.Random(2))
    batch = [texts.read(text(75, 3), tree), texts.read(text(70, 4), rows=7), texts.read(text(20, 5))]
    usual = texts.attend(batch, Rule(0.2))
    for large, programs in ((1, 3), (16, 1), (16, 100)):
        texts.changes = {"_large": large, "_programs": programs}
        assert torch.equal(texts.attend(batch, Rule(0.2)), usual)


def test_the_work_is_the_chunks_of_text_that_groups_of_rows_see() -> None:
    attention = TritonAttention(KVPool(KVShape(1, 1, 16, BF16), 1), 4)
    prefix_lens, listing = np.array([1030, 1030, 40, 3], np.int32), np.array([0, 5, 0, 2], np.int32)
    chunks = attention.chunks_of(prefix_lens, listing)
    assert chunks.tolist() == [3, 2, 1, 0], "a tile that holds an ancestor is the row's own"
    work = attention.work(np.array([0, 0, 9, 9], np.int32), chunks, 6)
    assert work.firsts.tolist() == [0, 2, 4, 4, 4, 4, 4]
    assert work.pairs.tolist() == [0, 3, 4, 4, 4, 4, 4] and work.parts.tolist() == [0, 3, 5, 6, 6, 6, 6]


def test_there_is_room_for_the_longest_text_and_for_more_rows_as_far_as_the_pool_pays_for_it() -> None:
    pool = KVPool(KVShape(1, 2, 16, BF16), 32 * 10)  # ten chunks
    part = 2 * 3 * 18 * 4
    assert TritonAttention(pool, 3, 1).capacity == 10
    assert TritonAttention(pool, 3, 10_000).capacity == (pool.keys.nbytes + pool.values.nbytes) // 4 // part


def test_a_rows_own_tiles_are_multiplied_among_few_rows_where_that_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = TritonAttention(KVPool(KVShape(2, KV_HEADS, 32, BF16), 4, DEVICE), GROUPS)
    assert attention.choose_products() or DEVICE.type == "cuda"
    monkeypatch.setattr(TritonAttention, "__call__", lambda self, rows, *_: rows.prefix_lens)
    assert not attention.choose_products()
    assert attention._few == attention._filled > 16


@pytest.mark.parametrize(("part", "number"), [("keys", torch.nan), ("keys", torch.inf), ("values", -torch.inf)])
def test_what_is_no_number_spoils_the_rows_that_see_it_and_no_others(part: str, number: float) -> None:
    """In the text, in a tile with ancestors, and in a tree's node."""
    texts, tree = Texts(24, torch.float32), TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], [1.0] * 4)
    segment, other = texts.read(text(70, 6), tree), texts.read(text(9, 7), rows=4)
    usual = texts.attend([other, segment], Rule(0.2))
    sees = {69: [0, 1, 2, 3], 5: [0, 1, 2, 3], 71: [1], 72: [2, 3]}  # the rows of the tree, by slot
    for slot, rows in sees.items():
        held = getattr(texts.pool, part)
        before = held.clone()
        block, lane = int(segment.cache.block_table[slot // BLOCK_SIZE]), slot % BLOCK_SIZE
        (held[0, block, :, :, lane] if part == "keys" else held[0, block, :, lane])[:, 3] = number
        found = texts.attend([other, segment], Rule(0.2))
        held.copy_(before)
        unseen = [row for row in range(8) if row - 4 not in rows]
        assert torch.equal(found[unseen], usual[unseen])
        if part == "values" or number != number:
            assert found[[4 + row for row in rows]].isnan().all()


def test_a_later_rows_value_that_is_not_finite_reaches_no_row_before_it() -> None:
    texts = Texts(32, torch.float32)
    segment = texts.read(text(30, 6))
    usual = texts.attend([segment], Rule(0.2))
    texts.pool.values[0, int(segment.cache.block_table[29 // BLOCK_SIZE]), :, 29 % BLOCK_SIZE] = torch.inf
    assert torch.equal(texts.attend([segment], Rule(0.2))[:-1], usual[:-1])


@pytest.mark.parametrize(
    ("table_of", "firsts"),
    [([0] * 5, [0, 3, 5, 5, 5, 5]), ([0, 9, 9, 9, 9], [0, 1, 4, 5, 5, 5]), ([4, 0, 4], [0, 1, 2, 3])],
)
def test_a_group_is_consecutive_rows_of_one_request(table_of: list[int], firsts: list[int]) -> None:
    assert grouped(np.array(table_of, np.int32), 3).tolist() == firsts
