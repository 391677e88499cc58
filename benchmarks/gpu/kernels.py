"""Compares the Triton attention with float64, and a row's bits alone, in a tree with others, and over three chunks;
times it, and a graph's smallest kernels. Then gated delta nets (`.delta`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.kv_shape import KVShape
from engine.core.tree import TokenTree
from engine.kernels.attention.attention import Rule
from engine.model.cuda.device_rows import DeviceRows
from engine.model.cuda.padded_rows import PaddedRows
from engine.model.cuda.triton_attention import CHUNK, TritonAttention
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool

from . import delta
from .candidates import plus_one
from .findings import Record, tried
from .times import replay_us

_SHAPES = {  # heads of keys and values, query heads for each, head size
    "llama 8B": (8, 4, 128),
    "smollm2": (3, 3, 64),
    "head size 96": (2, 1, 96),
    "head size 256": (2, 2, 256),
    "seven groups": (1, 7, 128),
}
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # difference, as a share of the norm of the result


def run(device: str) -> Iterator[Record]:
    small = device == "cpu"
    shapes = {"smollm2": (1, 2, 16)} if small else _SHAPES
    for name, shape in shapes.items():
        for dtype in (torch.bfloat16,) if small else (torch.bfloat16, torch.float32):
            yield tried(f"{name} {dtype}".replace("torch.", ""), _check, shape, dtype, torch.device(device))
    for what in ("window", "soft cap", "sinks"):
        yield tried(what, _check, shapes["smollm2"], torch.bfloat16, torch.device(device), what)
    yield tried("kernels that begin early", _chain, 2 if small else 300, torch.device(device))
    if not small:
        for length in (512, 4096, 16384):
            for kind in ("chain", "tree"):
                yield tried(f"llama 8B, 64 rows behind {length}, {kind}", _time, length, kind)
    yield from delta.run(device)


class _Texts:
    """Requests over one pool whose keys and values are random; what nobody has written is NaN."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, blocks: int):
        self.kv_heads, self.q_per_kv, self.head_dim = shape
        self.device, self.dtype = device, dtype
        self.pool = KVPool(KVShape(1, self.kv_heads, self.head_dim, dtype), blocks, device)
        self.pool.keys.fill_(torch.nan)
        self.pool.values.fill_(torch.nan)
        self.pool.allocate(7)  # so that no text begins at block 0
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self.device, self.dtype)

    def cache(self, keys: Tensor, values: Tensor) -> KVCache:
        """Return a request that holds these, [slots, kv_heads, head_dim]."""
        cache = KVCache(self.pool)
        cache.reserve(len(keys))
        block, lane = np.divmod(np.arange(len(keys)), BLOCK_SIZE)
        blocks = torch.from_numpy(cache.block_table[block].astype(np.int64)).to(self.device)
        lanes = torch.from_numpy(lane).to(self.device)
        self.pool.keys[0][blocks, :, : self.head_dim, lanes] = keys
        self.pool.values[0][blocks, :, lanes, : self.head_dim] = values
        return cache

    def attend(self, segments: list[Segment], queries: Tensor, rule: Rule) -> Tensor:
        """Attend with the kernel. queries, result: [rows, heads, head_dim]."""
        batch = Batch.of(segments)
        attention = TritonAttention(self.pool, self.q_per_kv, len(batch))
        return attention(_rows_of(batch, attention, self.device), 0, rule, queries)

    def expected(self, keys: Tensor, values: Tensor, query: Tensor, rule: Rule) -> Tensor:
        """Return [heads, head_dim] float64: the attention of a query that sees these keys and values."""
        k, v = (part.double().repeat_interleave(self.q_per_kv, 1) for part in (keys, values))
        if rule.window:
            k, v = k[-rule.window :], v[-rule.window :]
        scores = torch.einsum("hd,khd->hk", query.double(), k) * rule.scale
        if rule.softcap:
            scores = rule.softcap * (scores / rule.softcap).tanh()
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double()[:, None]], 1)
        return torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(k)], v)


def _rows_of(batch: Batch, attention: TritonAttention, device: torch.device) -> DeviceRows:
    rows = PaddedRows.of(batch, 0, len(batch), len(batch), attention).seen
    return DeviceRows(*(part.to(device) for part in rows))


def _check(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, what: str = "") -> Record:
    """Check a text of just over two chunks, and a tree after it whose spine is the text's next positions."""
    started = time.perf_counter()
    texts = _Texts(shape, dtype, device, blocks=400)
    heads, past, drafted = shape[0] * shape[1], 2 * CHUNK + 5, 6
    rule = {
        "window": Rule(0.2, window=CHUNK + 9),
        "soft cap": Rule(0.5, softcap=2.0),
        "sinks": Rule(0.2, sinks=torch.linspace(-2, 3, heads, device=device)),
    }.get(what, Rule(shape[2] ** -0.5))
    whole = past + drafted
    keys, values, queries = (texts.random(whole, n, shape[2]) for n in (shape[0], shape[0], heads))
    read = texts.cache(keys, values)
    read.length = past
    together = texts.attend([Segment.of_text([0] * drafted, read, "all")], queries[past:], rule)
    few = TritonAttention(texts.pool, shape[1]).choose_products()
    errors = []
    for i in range(drafted):
        seen = slice(0, past + i + 1)
        exact = texts.expected(keys[seen], values[seen], queries[past + i], rule)
        errors.append(float((together[i].double() - exact).norm() / exact.norm()))
    alone = [_alone(texts, keys, values, queries, past + i, rule) for i in range(drafted)]
    tree, spine = _spine_with_siblings(drafted)
    slots = torch.arange(past).tolist() + [past + min((n + 1) // 2, drafted - 1) for n in range(len(tree))]
    in_tree = texts.cache(keys[slots], values[slots])
    in_tree.length = past
    other = texts.cache(texts.random(3 * CHUNK, shape[0], shape[2]), texts.random(3 * CHUNK, shape[0], shape[2]))
    other.length = 3 * CHUNK - 2
    of_tree = queries[[slots[past + node] for node in range(len(tree))]]
    rows = torch.cat([texts.random(2, heads, shape[2]), of_tree])
    beside = texts.attend([Segment.of_text([0, 0], other, "all"), Segment.of_tree(tree, in_tree)], rows, rule)
    return {
        "right": max(errors) < _TOLERANCE[dtype],
        "error": float(f"{max(errors):.2e}"),
        "alone": all(torch.equal(one, row) for one, row in zip(alone, together, strict=True)),
        "in_tree": torch.equal(beside[2:][spine], together),
        "finite": bool(together.isfinite().all()),
        "few_rows_multiplied_alike": few,
        "seconds_with_compiling": round(time.perf_counter() - started, 2),
    }


def _alone(texts: _Texts, keys: Tensor, values: Tensor, queries: Tensor, at: int, rule: Rule) -> Tensor:
    cache = texts.cache(keys[: at + 1], values[: at + 1])
    cache.length = at
    row = texts.attend([Segment.of_text([0], cache, "all")], queries[at : at + 1], rule)[0]
    cache.release()
    return row


def _spine_with_siblings(length: int) -> tuple[TokenTree, list[int]]:
    """Return a path of that many nodes with a sibling before each but the first; and the path's nodes."""
    parents, spine = [-1], [0]
    for _ in range(length - 1):
        parents += [spine[-1], spine[-1]]
        spine.append(len(parents) - 1)
    return TokenTree.from_lists([*range(len(parents))], parents, [1.0] * len(parents)), spine


def _chain(count: int, device: torch.device) -> Record:
    """Measure the microseconds of each of `count` small kernels in a graph, as they are and as each begins while the
    last ends.
    """
    found: Record = {}
    for name, early in (("us", False), ("us_early", True)):
        x = torch.zeros(4096, device=device)
        if device.type == "cpu":
            plus_one(x, False)
            continue
        found[name] = replay_us(partial(plus_one, x, early), count)
    return found


def _time(length: int, kind: str) -> Record:
    """Time one layer's attention over 64 rows of one request, count the bytes of keys and values that it has to read,
    and time the same launches for rows that see nothing.
    """
    device = torch.device("cuda")
    texts = _Texts(_SHAPES["llama 8B"], torch.bfloat16, device, blocks=2 * length // BLOCK_SIZE)
    keys, values = (torch.randn(length, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    cache = texts.cache(keys, values)
    cache.length = length - 64
    parents = [-1, *(node // 4 if kind == "tree" else node for node in range(63))]
    batch = Batch.of([Segment.of_tree(TokenTree.from_lists([1] * 64, parents, [1.0] * 64), cache)])
    attention, queries, rule = TritonAttention(texts.pool, 4, 64), texts.random(64, 32, 128), Rule(128**-0.5)
    rows = _rows_of(batch, attention, device)
    nothing = DeviceRows(*(torch.zeros_like(part) for part in rows))
    return {
        "few": attention.choose_products(),
        "us": replay_us(lambda: attention(rows, 0, rule, queries), 20),
        "us_empty": replay_us(lambda: attention(nothing, 0, rule, queries), 20),
        "read_once_mb": round(keys.nbytes * 2 / 1e6, 1),
    }
