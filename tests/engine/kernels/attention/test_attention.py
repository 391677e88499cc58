"""Exact attention against a definition in float64, and its bits against those of other layouts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.kernels.attention import attention as attention_module
from engine.kernels.attention.attention import Attention, Rule, has_pairs
from engine.kernels.attention.every_kernel import AttentionKernel, every_attention_kernel
from engine.kernels.gemm.matmul import Unit
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool
from tests.engine.kernels.gemm.int8_reference import rounded
from tests.engine.kernels.pool_layout import fill, in_codes, padded
from tests.grids import pairs


@dataclass(frozen=True)
class Kernel:
    """A kernel and what its result may differ by from the definition."""

    of: AttentionKernel
    absolute_error: float
    relative_error: float

    def __str__(self) -> str:
        return str(self.of)

    def shape(self, dims: int, kv_heads: int = 1) -> KVShape:
        return self.of.shape(2, kv_heads, dims)

    def kept(self, x: Tensor) -> Tensor:
        """Keys or values as the pool holds them, in float64."""
        x = x.to(self.of.dtype)
        if not self.of.q8_0:
            return x.double()
        return in_codes(padded(x, self.shape(x.shape[-1])))[..., : x.shape[-1]].double()

    def asked(self, x: Tensor) -> Tensor:
        """Queries as scores are made of them, in float64."""
        if not self.of.q8_0:
            return x.to(self.of.dtype).double()
        x = x.to(self.of.dtype).float() if self.of.vnni else x
        codes, scales = rounded(padded(x, self.shape(x.shape[-1])).flatten(0, -2).numpy())
        numbers = torch.from_numpy(codes * scales[..., None]).view(*x.shape[:-1], -1)
        return numbers[..., : x.shape[-1]].double()


def _of(kernel: AttentionKernel) -> Kernel:
    if kernel.vnni:  # weights are rounded to bfloat16, values are around 2
        return Kernel(kernel, 0.05, 2**-8)
    if kernel.q8_0:
        return Kernel(kernel, 1e-4, 1e-4 if kernel.dtype == torch.float32 else 2**-8)
    return Kernel(kernel, 1e-4, 1e-5) if kernel.dtype == torch.float32 else Kernel(kernel, 1e-5, 2**-8)


KERNELS = [
    pytest.param(
        _of(kernel), id=str(kernel), marks=pytest.mark.skipif(not kernel.runs, reason=f"needs {kernel.instructions}")
    )
    for kernel in every_attention_kernel()
]
KV_HEADS = 2
# two branches below the root, the second longer than the first, and a sibling of the root's child without children
BUSHY = TokenTree.from_lists([0, 1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 2, 0, 4, 6], [1.0] * 8)


class Request:
    """Random keys, values and queries of one text and the tree behind it. past: positions of text."""

    def __init__(self, seed: int, past: int, tree: TokenTree | None, rows: int = 0, dims: int = 64, groups: int = 3):
        generator = torch.Generator().manual_seed(seed)
        self.past, self.tree = past, tree
        self.rows = rows if tree is None else len(tree)
        self.keys, self.values = torch.randn(2, past + self.rows, KV_HEADS, dims, generator=generator) * 2
        self.queries = torch.randn(self.rows, KV_HEADS, groups, dims, generator=generator) * 2

    def seen(self, row: int) -> list[int]:
        """The slots that the row attends to, in the order of positions."""
        if self.tree is None:
            return list(range(self.past + row + 1))
        return list(range(self.past)) + [self.past + node for node in self.tree.path(row)]

    def path_as_text(self, node: int) -> Request:
        """Return a text of the positions that a node of the tree attends to, whose last row is the node's."""
        assert self.tree is not None
        path, slots = self.tree.path(node), self.seen(node)
        text = Request(0, self.past, None, len(path))
        text.keys, text.values, text.queries = self.keys[slots], self.values[slots], self.queries[path]
        return text

    def segment(self, cache: KVCache) -> Segment:
        if self.tree is not None:
            return Segment.of_tree(self.tree, cache)
        return Segment.of_text([0] * self.rows, cache)


def attend(
    requests: Sequence[Request], rule: Rule, kernel: Kernel, order: int = 0, unseen: float = 0.0
) -> list[Tensor]:
    """Each request's result [rows, heads, head_dim]. order: seed of the blocks' order; unseen: what all else holds."""
    _, kv_heads, groups, dims = requests[0].queries.shape
    pool = KVPool(kernel.shape(dims, kv_heads), 64)
    random.Random(order).shuffle(pool._free)
    keys, values = torch.zeros(2, 2, 64, kv_heads, BLOCK_SIZE, pool.shape.dims, dtype=kernel.of.dtype)
    keys[..., :dims] = unseen
    values[..., :dims] = unseen
    caches = [KVCache(pool) for _ in requests]
    for cache, request in zip(caches, requests, strict=True):
        cache.reserve(request.past + request.rows)
        cache.length = request.past
        for i in range(request.past + request.rows):
            block, lane = int(cache.block_table[i // BLOCK_SIZE]), i % BLOCK_SIZE
            keys[1, block, :, lane, :dims] = request.keys[i]
            values[1, block, :, lane, :dims] = request.values[i]
    fill(pool, keys, values)
    attention = Attention(pool, groups)
    attention.kernel = kernel.of.compiled()
    batch = Batch.of([request.segment(cache) for request, cache in zip(requests, caches, strict=True)])
    attention.begin(batch)
    rows, padded = len(batch), pool.shape.dims
    queries = attention.queries[: rows * kv_heads * groups * padded].view(kv_heads, rows, groups, padded)
    asked = torch.cat([request.queries for request in requests])
    queries[..., :dims] = asked.to(queries.dtype if kernel.of.q8_0 else kernel.of.dtype).transpose(0, 1)
    out = torch.empty(rows, kv_heads * groups, dims, dtype=kernel.of.dtype)
    attention.attend(1, rule, out)
    return list(out.split([request.rows for request in requests]))


def definition(request: Request, rule: Rule, kernel: Kernel) -> Tensor:
    """Softmax attention in float64, of numbers that are rounded as the kernel's are."""
    keys, values, queries = kernel.kept(request.keys), kernel.kept(request.values), kernel.asked(request.queries)
    out = torch.zeros(queries.shape, dtype=torch.float64)
    _, kv_heads, groups, _ = queries.shape
    for row in range(request.rows):
        seen = request.seen(row)
        seen = seen[-rule.window :] if rule.window else seen
        for head in range(kv_heads):
            for group in range(groups):
                scores = keys[seen, head] @ queries[row, head, group] * rule.scale
                if rule.softcap:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                if rule.sinks is not None:
                    scores = torch.cat([scores, rule.sinks[head * groups + group, None].double()])
                out[row, head, group] = scores.softmax(0)[: len(seen)] @ values[seen, head]
    return out.flatten(1, 2)


def assert_right(requests: Sequence[Request], rule: Rule, kernel: Kernel, unseen: float = 0.0) -> None:
    for request, found in zip(requests, attend(requests, rule, kernel, unseen=unseen), strict=True):
        expected = definition(request, rule, kernel)
        torch.testing.assert_close(found.double(), expected, atol=kernel.absolute_error, rtol=kernel.relative_error)


@pairs(kernel=KERNELS, head_dim=[8, 64, 80, 96, 128, 256], groups=[1, 2, 3, 7])
def test_it_is_softmax_attention_for_any_head_size_and_group(head_dim: int, groups: int, kernel: Kernel) -> None:
    requests = [Request(1, 37, BUSHY, 0, head_dim, groups), Request(2, 16, None, 9, head_dim, groups)]
    assert_right(requests, Rule(head_dim**-0.5), kernel, unseen=float("nan"))


@pairs(
    kernel=KERNELS,
    rule=[Rule(0.1, 1), Rule(0.1, 5), Rule(0.1, 16), Rule(0.1, 40), Rule(0.1, 5, 8.0)],
    past=[0, 3, 16, 45],
)
def test_a_row_sees_its_window_of_positions_and_no_more(past: int, rule: Rule, kernel: Kernel) -> None:
    assert_right([Request(3, past, BUSHY), Request(4, past, None, 21)], rule, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
def test_soft_caps_and_sinks_are_those_of_the_definition(softcap: float, kernel: Kernel) -> None:
    sinks = torch.linspace(-2, 4, 6)
    assert_right([Request(5, 40, BUSHY), Request(6, 33, None, 5)], Rule(0.125, 0, softcap, sinks), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", [Rule(0.125), Rule(0.125, 5), Rule(0.125, 20, 30.0)])
def test_what_nobody_sees_may_be_nan(rule: Rule, kernel: Kernel) -> None:
    requests = [Request(7, 30, BUSHY), Request(8, 5, None, 6)]
    clean, dirty = attend(requests, rule, kernel), attend(requests, rule, kernel, unseen=float("nan"))
    assert all(torch.equal(one, other) for one, other in zip(clean, dirty, strict=True))


RULES = [Rule(0.125), Rule(0.125, 0, 30.0), Rule(0.125, 5), Rule(0.125, 17)]
NUMBERS = [float("nan"), float("inf")]


def readers(request: Request, rule: Rule, slot: int) -> list[bool]:
    """Whether each row of the request sees that slot."""
    return [slot in request.seen(row)[-rule.window :] for row in range(request.rows)]


@pairs(kernel=KERNELS, rule=RULES, number=NUMBERS, past=[0, 14, 45])
def test_a_value_that_is_no_number_reaches_the_rows_that_see_it_and_no_others(
    past: int, number: float, rule: Rule, kernel: Kernel
) -> None:
    """In a tree and in a text, at every place; a row that does not see it keeps its bits."""
    for tree, rows in ((BUSHY, 0), (None, 20)):
        request = Request(9, past, tree, rows)
        (clean,) = attend([request], rule, kernel)
        for slot in {0, past // 2, past - 1, past + 1, past + 5} & set(range(past + request.rows)):
            values, request.values = request.values, request.values.clone()
            request.values[slot] = number
            (found,), request.values = attend([request], rule, kernel), values
            for row, sees in enumerate(readers(request, rule, slot)):
                if sees:
                    assert not found[row].isfinite().any()
                else:
                    assert torch.equal(found[row], clean[row])


@pairs(kernel=KERNELS, rule=RULES, part=["keys", "queries"])
def test_a_key_or_query_that_is_no_number_reaches_the_rows_that_score_it_and_no_others(
    part: str, rule: Rule, kernel: Kernel
) -> None:
    request = Request(9, 30, BUSHY)
    (clean,) = attend([request], rule, kernel)
    at = 1 if part == "queries" else request.past + 1
    getattr(request, part)[at] = float("nan")
    (found,) = attend([request], rule, kernel)
    for row, sees in enumerate(readers(request, rule, request.past + 1)):
        if sees if part == "keys" else row == 1:
            assert found[row].isnan().all()
        else:
            assert torch.equal(found[row], clean[row])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", RULES)
def test_rows_that_see_what_is_no_number_have_the_same_bits_alone_and_beside_others(rule: Rule, kernel: Kernel) -> None:
    """One dimension of one value is infinite: the others are those of the definition, whichever rows share a block."""
    request = Request(15, 45, BUSHY)
    request.values[40, :, 3], request.values[request.past, :, 7] = float("inf"), float("nan")
    (together,) = attend([request], rule, kernel)
    for node in range(len(BUSHY)):
        (alone,) = attend([request.path_as_text(node)], rule, kernel)
        assert torch.equal(alone[-1].nan_to_num(), together[node].nan_to_num())
        assert torch.equal(alone[-1].isnan(), together[node].isnan())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", [Rule(0.125), Rule(0.125, 20), Rule(0.125, 0, 30.0)])
def test_bits_depend_neither_on_neighbours_nor_on_the_order_of_blocks_nor_on_threads(
    rule: Rule, kernel: Kernel
) -> None:
    requests = [Request(10, 61, BUSHY), Request(11, 17, None, 30), Request(12, 200, BUSHY), Request(13, 0, None, 2)]
    alone = [attend([request], rule, kernel)[0] for request in requests]
    for order, threads in ((1, 1), (2, 2)):
        torch.set_num_threads(threads)
        together = attend(requests, rule, kernel, order)
        backwards = attend(requests[::-1], rule, kernel, order)[::-1]
        for one, *others in zip(alone, together, backwards, strict=True):
            assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", [Rule(0.125), Rule(0.125, 20)])
def test_a_node_has_the_bits_of_its_path_read_as_text(rule: Rule, kernel: Kernel) -> None:
    request = Request(14, 45, BUSHY)
    (out,) = attend([request], rule, kernel)
    for node in range(len(BUSHY)):
        assert torch.equal(attend([request.path_as_text(node)], rule, kernel)[0][-1], out[node])


PAIRED = [param for param, kernel in zip(KERNELS, every_attention_kernel(), strict=True) if kernel.vnni]


@pairs(
    kernel=PAIRED,
    rule=[*RULES, Rule(0.125, 0, 2.0, torch.linspace(-2, 4, 6))],
    number=[0.5, *NUMBERS],
    chunk=[1, 2, 5],
    tile_rows=[1, 3, 16],
)
def test_a_long_text_read_in_chunks_has_the_bits_of_one_read_whole(
    kernel: Kernel, rule: Rule, number: float, chunk: int, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rows share a chunk; also where a value is no number."""
    requests = [Request(16, 150, BUSHY), Request(17, 70, None, 40), Request(18, 3, BUSHY)]
    for request in requests:
        request.values[request.past // 2 + 1, :, 5] = number
    whole = attend(requests, rule, kernel)
    monkeypatch.setattr(Attention, "_rows_of_tile", lambda self, rows: tile_rows)
    monkeypatch.setattr(Attention, "_blocks_kept", lambda self, batch, vectors: (chunk, chunk + 2))
    for one, other in zip(whole, attend(requests, rule, kernel), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("kernel", PAIRED)
@pytest.mark.parametrize(("chain", "window", "groups"), [(60, 8, 8), (60, 8, 1), (20, 1, 16), (40, 20, 3)])
def test_a_branch_deeper_than_the_window_writes_nowhere_but_into_its_scratch(
    chain: int, window: int, groups: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first ancestors lie before all that a tile of its rows sees."""
    guard, guarded, begin = 4096, list[Tensor](), Attention.begin

    def begin_guarded(attention: Attention, batch: Batch) -> object:
        result, room = begin(attention, batch), attention._scratch.numel()
        guarded.append(torch.full((room + 2 * guard,), 77, dtype=torch.uint8))
        attention._work["scratch"] = guarded[-1].data_ptr() + guard
        return result

    monkeypatch.setattr(Attention, "begin", begin_guarded)
    tree = TokenTree.from_lists([*range(chain + 2)], [-1, 0, 0, *range(2, chain + 1)], [1.0] * (chain + 2))
    assert_right([Request(19, 45, tree, 0, 64, groups)], Rule(0.125, window), kernel)
    assert all((place[:guard] == 77).all() and (place[-guard:] == 77).all() for place in guarded)


def test_a_lesser_processor_asks_for_no_kernel_that_it_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "units", lambda *_: (Unit.FMA,))
    monkeypatch.setattr(attention_module, "lane_kernel", lambda: "lanes")
    for other in ("tile_kernel", "pair_kernel"):
        monkeypatch.setattr(attention_module, other, lambda: pytest.fail("cannot be compiled there"))
    for dtype in (torch.float32, torch.bfloat16):
        assert Attention(KVPool(KVShape(1, 1, 64, dtype), 8), 2).kernel == "lanes"
        assert {*attention_module.attention_kernels(dtype, False)} == {"lanes"}


def test_a_tile_of_a_long_text_keeps_a_chunk_of_scores_and_its_tail_and_one_of_a_short_text_all() -> None:
    """A tail reaches as far as the slots of ancestors that an earlier forward computed."""
    pool = KVPool(KVShape(1, KV_HEADS, 64, torch.bfloat16, has_pairs(torch.bfloat16)), 400)
    attention, cache = Attention(pool, 6), KVCache(pool)
    attention._in_chunks = True
    cache.reserve(5000)
    chain = TokenTree.from_lists([*range(60)], [-1, 0, *range(58)], [1.0] * 60)
    trees = {None: (32, 32), BUSHY: (32, 33), chain: (32, 36)}
    for tree, kept in trees.items():
        cache.length = 4900
        segment = Segment.of_text([0] * 8, cache) if tree is None else Segment.of_tree(tree, cache, len(tree) - 2)
        assert attention._blocks_kept(Batch.of([segment]), 96) == kept
        assert attention._blocks_kept(Batch.of([segment]), 6) == (len(cache.block_table), len(cache.block_table))
