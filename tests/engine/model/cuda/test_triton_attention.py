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

from engine.core.batch import BLOCK, Batch, Segment
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.kernels.attention.attention import Rule
from engine.model.cuda import triton_attention
from engine.model.cuda.triton_attention import DeviceRows, TritonAttention, grouped
from engine.model.kv_pool import KVCache, KVPool
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
        self.head_dim, self.dtype = head_dim, dtype
        self._taken = self.pool.take(7)  # so that blocks do not begin at 0

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
        block, lane = int(cache.table[slot // BLOCK]), slot % BLOCK
        self.pool.keys[0, block, :, : self.head_dim, lane] = self.vector(token, position, 1, KV_HEADS)
        self.pool.values[0, block, :, lane, : self.head_dim] = self.vector(token, position, 2, KV_HEADS)

    def attend(self, segments: list[Segment], rule: Rule) -> Tensor:
        """[rows, heads, head_dim]"""
        batch = Batch.of(segments)
        rows_of = zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)
        query = torch.stack([self.vector(token, at, 3, KV_HEADS * GROUPS) for token, at in rows_of])
        pool, seen = self.pool, int(batch.positions.max()) + 1
        moved: Any = KVPool(pool.shape, 1)
        moved.part.keys, moved.part.values = pool.keys.to(DEVICE), pool.values.to(DEVICE)
        attention = TritonAttention(moved, GROUPS)
        arrays = (batch.prefix_lens, batch.ancestor_ptr, batch.ancestor_slots, batch.tables, batch.table_of)
        chunks = -(-seen // triton_attention.CHUNK)
        firsts = grouped(batch.table_of, attention.together(len(batch), chunks))
        rows = DeviceRows(*(torch.from_numpy(array).to(DEVICE) for array in (*arrays, firsts)))
        return attention(rows, chunks, 0, rule, query.to(DEVICE)).cpu()

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_attention_of_each_path_alone(rule: str, dtype: torch.dtype) -> None:
    texts = Texts(24, dtype)
    prompt, tree = text(37, 1), random_tree(5, text(5, 2), random.Random(3))
    found = texts.attend([texts.read(prompt, tree)], RULES[rule])
    for node in range(len(tree)):
        expected = texts.expected([*prompt, *tree.path_tokens(node)], RULES[rule])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[node].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "dtype"), [*product([16, 40, 64, 96, 128, 256], [BF16]), (64, FP32), (256, FP32)])
def test_every_head_size_from_16_to_256_is_served(head_dim: int, dtype: torch.dtype) -> None:
    texts, prompt = Texts(head_dim, dtype), text(70, 4)
    found = texts.attend([texts.read(prompt, TokenTree.chain(1, [2], [1.0]))], Rule(head_dim**-0.5))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = texts.expected([*prompt, 1, 2], Rule(head_dim**-0.5))
    torch.testing.assert_close(found[1].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("rule", "dtype"), [("plain", BF16), ("wide window", FP32), ("sinks", BF16)], ids=str)
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


def test_chunks_that_only_longer_texts_need_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    texts = Texts(32, torch.float32)
    short, long = texts.read(text(20, 8)), texts.read(text(200, 9), TokenTree.root_only(1))
    assert torch.equal(texts.attend([short], Rule(0.2)), texts.attend([short, long], Rule(0.2))[:9])
    assert texts.attend([long, short], Rule(0.2, window=5)).isfinite().all()


@pytest.mark.parametrize("few", [1, 4])
def test_how_rows_are_grouped_changes_no_bit(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    monkeypatch.setattr(triton_attention, "_BUSY", 0)
    texts = Texts(32, torch.bfloat16)
    tree = random_tree(12, text(12, 1), random.Random(2))
    batch = [texts.read(text(75, 3), tree), texts.read(text(70, 4), rows=7), texts.read(text(20, 5))]
    usual = texts.attend(batch, Rule(0.2))
    monkeypatch.setattr(triton_attention, "_BUSY", 1000)
    monkeypatch.setattr(triton_attention, "_FEW", few)
    assert torch.equal(texts.attend(batch, Rule(0.2)), usual)


def test_a_later_rows_value_that_is_not_finite_reaches_no_row_before_it() -> None:
    texts = Texts(32, torch.float32)
    segment = texts.read(text(30, 6))
    usual = texts.attend([segment], Rule(0.2))
    texts.pool.values[0, int(segment.cache.table[29 // BLOCK]), :, 29 % BLOCK] = torch.inf
    assert torch.equal(texts.attend([segment], Rule(0.2))[:-1], usual[:-1])


def test_groups_are_small_until_there_are_programs_for_a_whole_gpu() -> None:
    attention = TritonAttention(KVPool(KVShape(1, 8, 128, torch.bfloat16), 1), 4)
    assert [attention.together(64, chunks) for chunks in (1, 2, 4)] == [4, 4, 16]
    assert [attention.together(rows, 1) for rows in (16, 128, 256)] == [4, 4, 16]


@pytest.mark.parametrize(
    ("table_of", "firsts"),
    [([0] * 5, [0, 3, 5, 5, 5, 5]), ([0, 9, 9, 9, 9], [0, 1, 4, 5, 5, 5]), ([4, 0, 4], [0, 1, 2, 3])],
)
def test_a_group_is_consecutive_rows_of_one_request(table_of: list[int], firsts: list[int]) -> None:
    assert grouped(np.array(table_of, np.int32), 3).tolist() == firsts
