"""Compares an attention kernel with softmax attention in float64, alone and beside others, and with an infinity."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Batch, Segment
from engine.core.tree import TokenTree
from engine.kernels.attention.attention import Attention, Rule
from engine.kernels.attention.enter import ENTER, enter_kernel
from engine.kernels.attention.every_kernel import AttentionKernel
from engine.kernels.attention.kv_codes import enter_codes_kernel
from engine.kernels.threads import address_of
from engine.model.kv_cache import KVCache
from engine.model.kv_pool import KVPool

_PAST, _HEADS, _GROUPS, _DIMS = 45, 2, 3, 64
_TREE = TokenTree.from_lists([0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 0], [1.0] * 6)
_RULES = (Rule(0.125), Rule(0.125, 20), Rule(0.125, 0, 30.0))
_SPOILED = 1  # the node whose values are infinite


def difference(kernel: AttentionKernel) -> str:
    """Return what is wrong with the kernel's results; "" if nothing is."""
    given = torch.randn(_PAST + len(_TREE), (_GROUPS + 2) * _HEADS, _DIMS, generator=torch.Generator().manual_seed(0))
    given = given.to(kernel.dtype)
    spoiled = given.clone()
    spoiled[_PAST + _SPOILED, -_HEADS:] = torch.inf
    most = 1e-5 if kernel.dtype == torch.float32 and not kernel.q8_0 else 0.02
    for rule in _RULES:
        found, expected = _attended(kernel, rule, given), _definition(rule, given)
        if not (error := float((found.double() - expected).norm() / expected.norm())) < most:
            return f"its error is {error:.2g}"
        beside = _attended(kernel, rule, spoiled)
        for node in range(len(_TREE)):
            path = _TREE.path(node)
            rows = [*range(_PAST), *(_PAST + other for other in path)]
            if not torch.equal(_attended(kernel, rule, given[rows], text=len(path))[-1], found[node]):
                return "a row's bits depend on the rows beside it"
            if not (_SPOILED in path or torch.equal(beside[node], found[node])):
                return "an infinity reaches a row that does not see it"
            if _SPOILED in path and beside[node].isfinite().any():
                return "an infinity is hidden from a row that sees it"
    return ""


def _attended(kernel: AttentionKernel, rule: Rule, given: Tensor, text: int = 0) -> Tensor:
    """Return the kernel's results [rows, heads, dims] for the tree's nodes, or for the last `text` rows as text. given:
    [positions, heads * groups queries, then keys, then values, dims].
    """
    pool = KVPool(kernel.shape(1, _HEADS, _DIMS), 8)
    pool._free.reverse()
    cache, rows = KVCache(pool), text or len(_TREE)
    cache.reserve(len(given))
    cache.length = len(given) - rows
    queries = _entered(pool, cache, given)
    attention = Attention(pool, _GROUPS)
    attention.kernel = kernel.compiled()
    attention.begin(Batch.of([Segment.of_text([0] * rows, cache) if text else Segment.of_tree(_TREE, cache)]))
    attention.queries[: queries[:, -rows:].numel()] = queries[:, -rows:].flatten()
    out = torch.empty(rows, _HEADS * _GROUPS, _DIMS, dtype=kernel.dtype)
    attention.attend(0, rule, out)
    return out


def _entered(pool: KVPool, cache: KVCache, given: Tensor) -> Tensor:
    """Write keys and values to the pool as a layer does; return the queries [heads, positions, groups, dims]."""
    shape, count, work = pool.shape, len(given), np.zeros(1, ENTER)
    places = np.arange(count, dtype=np.int32)
    slots = (cache.block_table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE).astype(np.int32)
    queries = torch.zeros(_HEADS, count, _GROUPS, shape.dims, dtype=shape.dtype if shape.vnni else torch.float32)
    scratch, qkv, record = torch.zeros(torch.get_num_threads(), shape.dims), given.contiguous(), work[0]
    record["positions"], record["slots"], record["rows"] = places.ctypes.data, slots.ctypes.data, count
    record["queries"], record["scratch"], record["qkv"] = queries.data_ptr(), scratch.data_ptr(), qkv.data_ptr()
    record["keys"], record["values"] = pool.addresses(0)
    record["kv_heads"], record["q_per_kv"], record["head_dim"] = _HEADS, _GROUPS, _DIMS
    record["stride"] = qkv[0].numel() * qkv.itemsize
    record["dims"], record["width"], record["vnni"] = shape.dims, qkv.itemsize, shape.vnni
    (enter_codes_kernel() if shape.q8_0 else enter_kernel())(address_of(work), 1)
    return queries


def _definition(rule: Rule, given: Tensor) -> Tensor:
    """Compute softmax attention in float64, of the numbers as they are given."""
    queries, keys, values = given.double().split([_GROUPS * _HEADS, _HEADS, _HEADS], dim=1)
    out = torch.zeros(len(_TREE), _HEADS * _GROUPS, _DIMS, dtype=torch.float64)
    for node in range(len(_TREE)):
        seen = [*range(_PAST), *(_PAST + other for other in _TREE.path(node))][-rule.window :]
        for head in range(_HEADS * _GROUPS):
            scores = keys[seen, head // _GROUPS] @ queries[_PAST + node, head] * rule.scale
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            out[node, head] = scores.softmax(0) @ values[seen, head // _GROUPS]
    return out
