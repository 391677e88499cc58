"""The exact attention of `engine.kernels.attention.attention` on CUDA, as Triton kernels.

It reads the same pool and the same arrays of a batch, and gives the same guarantee: a row's result is a function of its
own visible keys in the order of positions, and of nothing else. One program computes one row, one KV head and one chunk
of 512 positions, counted from position 0, in tiles of a fixed size. A second kernel joins a row's chunks in order. So
neither the other rows nor the lengths of other texts change the order of summation. A position is a place in the row's
own sequence, first the text and then its ancestors in the tree, so it does not matter which of the two a key belongs
to, nor in which slot it lies.

CUDA builds of torch bring Triton; without a GPU the tests run these kernels through Triton's interpreter, and compile
them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.batch import BLOCK
from engine.kernels.attention.attention import Rule
from engine.model.kv_pool import KVPool

CHUNK = 512
"""Positions that one program adds up: fixed, so that a row's sum does not depend on how long other texts are."""

_LEAST = 16  # fewest rows of a product on tensor cores
_TILE_BYTES = 16384  # of keys; with as much of values, twice, it fits into any current GPU's shared memory
# with 4 warps some shapes spill registers, in float32 by kilobytes
_CHUNKED = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}
_JOINED = {"num_warps": 1, "enable_fp_fusion": False}
_INTERPRETED = bool(triton.knobs.runtime.interpret)  # the interpreter multiplies the bits of bfloat16 as integers


class DeviceRows(NamedTuple):
    """What attention needs to know of a batch's rows, on the device, int32; see `engine.core.batch.Batch`."""

    prefixes: Tensor
    others: Tensor
    listed: Tensor
    tables: Tensor
    table_of: Tensor


@triton.jit
def _product(a, b, WIDENED: tl.constexpr):
    if WIDENED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["chunks"])
def _attend_chunk(
    query,  # [rows, kv_heads * groups, head_dim]
    keys,  # [blocks, kv_heads, dims, 16]
    values,  # [blocks, kv_heads, 16, dims]
    tables,
    table_of,
    prefixes,
    others,
    listed,
    peaks,  # out: [rows, heads, chunks] float32, the largest score
    totals,  # out: [rows, heads, chunks] float32, the sum of exp(score - peak)
    sums,  # out: [rows, heads, chunks, dims] float32, the sum of values times exp(score - peak)
    chunks,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_FILLED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_FILLED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Attention of a row's queries to one chunk of one KV head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    prefix = tl.load(prefixes + row)
    begin = tl.load(others + row)
    seen = prefix + tl.load(others + row + 1) - begin
    start = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    low = chunk * CHUNK
    if low >= seen or low + CHUNK <= start:
        return

    group = tl.arange(0, GROUPS_FILLED)
    dim = tl.arange(0, DIMS_FILLED)
    lane = tl.arange(0, TILE)
    heads = row * KV_HEADS * GROUPS + head * GROUPS + group
    q = tl.load(
        query + heads[:, None] * HEAD_DIM + dim[None, :],
        mask=(group < GROUPS)[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    table = tables + tl.load(table_of + row)
    peak = tl.full([GROUPS_FILLED], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS_FILLED], tl.float32)
    summed = tl.zeros([GROUPS_FILLED, DIMS_FILLED], tl.float32)
    for at in range(tl.maximum(low, start // TILE * TILE), tl.minimum(low + CHUNK, seen), TILE):
        position = at + lane
        visible = (position >= start) & (position < seen)
        ancestor = tl.load(listed + begin + position - prefix, mask=visible & (position >= prefix), other=0)
        slot = tl.where(position < prefix, position, ancestor)
        block = tl.load(table + slot // BLOCK, mask=visible, other=0).to(tl.int64)
        place = (block * KV_HEADS + head) * (DIMS * BLOCK)
        offset = slot % BLOCK
        # Masked slots are not read: a slot that was never written may hold NaN, and 0 x NaN is NaN.
        key = tl.load(
            keys + place[None, :] + dim[:, None] * BLOCK + offset[None, :],
            mask=visible[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        score = _product(q, key, WIDENED) * scale
        if CAPPED:  # cap * tanh(score / cap)
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (score / softcap)) + 1.0))
        score = tl.where(visible[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))  # at least one position of a tile is visible
        weight = tl.exp(score - higher[:, None])
        kept = tl.exp(peak - higher)
        value = tl.load(
            values + place[:, None] + offset[:, None] * DIMS + dim[None, :],
            mask=visible[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weight, 1)
        summed = summed * kept[:, None] + _product(weight.to(value.dtype), value, WIDENED)
        peak = higher
    place = heads * chunks + chunk
    tl.store(peaks + place, peak, mask=group < GROUPS)
    tl.store(totals + place, total, mask=group < GROUPS)
    tl.store(
        sums + place[:, None] * DIMS + dim[None, :], summed, mask=(group < GROUPS)[:, None] & (dim < DIMS)[None, :]
    )


@triton.jit(do_not_specialize=["chunks"])
def _attend_joined(
    peaks,
    totals,
    sums,
    prefixes,
    others,
    sinks,  # [heads] float32
    out,  # [rows, heads, head_dim]
    chunks,
    window,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_FILLED: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the chunks of one row and one query head, in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seen = tl.load(prefixes + row) + tl.load(others + row + 1) - tl.load(others + row)
    start = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    dim = tl.arange(0, DIMS_FILLED)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    summed = tl.zeros([DIMS_FILLED], tl.float32)
    for chunk in range(start // CHUNK, (seen + CHUNK - 1) // CHUNK):
        place = (row * HEADS + head) * chunks + chunk
        here = tl.load(peaks + place)
        higher = tl.maximum(peak, here)
        kept, share = tl.exp(peak - higher), tl.exp(here - higher)
        total = total * kept + tl.load(totals + place) * share
        summed = summed * kept + tl.load(sums + place * DIMS + dim, mask=dim < DIMS, other=0.0) * share
        peak = higher
    if SINKS:
        sink = tl.load(sinks + head)
        higher = tl.maximum(peak, sink)
        kept = tl.exp(peak - higher)
        total = total * kept + tl.exp(sink - higher)
        summed = summed * kept
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dim, summed / total, mask=dim < HEAD_DIM)


class TritonAttention:
    """Attention over a pool. groups: query heads per KV head."""

    def __init__(self, pool: KVPool, groups: int):
        self.pool, self.groups = pool, groups
        shape = pool.shape
        self._dims_filled = triton.next_power_of_2(shape.dims)
        row_bytes = self._dims_filled * shape.dtype.itemsize
        self._tile = max(_LEAST, min(64, _TILE_BYTES // row_bytes))  # divides CHUNK: both are powers of two

    def __call__(self, rows: DeviceRows, chunks: int, layer: int, rule: Rule, query: Tensor) -> Tensor:
        """Attend with each row's queries to the layer's keys and values. query, result: [rows, heads, head_dim].

        chunks: at least as many as the row with the most visible keys needs.
        """
        shape, (count, heads, _) = self.pool.shape, query.shape
        scratch = query.new_empty(count, heads, chunks, shape.dims, dtype=torch.float32)
        peaks, totals = (query.new_empty(count, heads, chunks, dtype=torch.float32) for _ in range(2))
        out = torch.empty_like(query)
        _attend_chunk[(count, shape.kv_heads, chunks)](
            query,
            self.pool.keys[layer],
            self.pool.values[layer],
            rows.tables,
            rows.table_of,
            rows.prefixes,
            rows.others,
            rows.listed,
            peaks,
            totals,
            scratch,
            chunks,
            rule.window,
            rule.scale,
            rule.softcap,
            KV_HEADS=shape.kv_heads,
            GROUPS=self.groups,
            GROUPS_FILLED=max(_LEAST, triton.next_power_of_2(self.groups)),
            HEAD_DIM=shape.head_dim,
            DIMS=shape.dims,
            DIMS_FILLED=self._dims_filled,
            TILE=self._tile,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            CAPPED=rule.softcap != 0,
            WIDENED=_INTERPRETED,
            **_CHUNKED,
        )
        _attend_joined[(count, heads)](
            peaks,
            totals,
            scratch,
            rows.prefixes,
            rows.others,
            peaks if rule.sinks is None else rule.sinks,
            out,
            chunks,
            rule.window,
            HEADS=heads,
            HEAD_DIM=shape.head_dim,
            DIMS=shape.dims,
            DIMS_FILLED=self._dims_filled,
            CHUNK=CHUNK,
            SINKS=rule.sinks is not None,
            **_JOINED,
        )
        return out
