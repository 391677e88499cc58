"""The exact attention of `engine.kernels.attention.attention` on CUDA, as Triton kernels.

It reads the same pool and the same arrays of a batch, and gives the same guarantee: a row's result is a function of its
own visible keys in the order of positions, and of nothing else. One program computes a few rows of one request, one KV
head and one chunk of 512 positions, counted from position 0, in tiles of a fixed size. A second kernel joins a row's
chunks in order. So neither the other rows nor the lengths of other texts change the order of summation. A position is a
place in the row's own sequence, first the text and then its ancestors in the tree, so it does not matter which of the
two a key belongs to, nor in which slot it lies.

The rows of a program (a group) share the tiles in which all of them read the same slots: those of the text. A tile in
which a row reads an ancestor is read once for each row, with the other rows masked. A masked row adds zeros to what it
has, which leaves its bits as they are; so how rows are grouped changes nothing.

CUDA builds of torch bring Triton; without a GPU the tests run these kernels through Triton's interpreter, and compile
them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.batch import BLOCK, Int
from engine.kernels.attention.attention import Rule
from engine.model.kv_pool import KVPool

CHUNK = 512
"""Positions that one program adds up: fixed, so that a row's sum does not depend on how long other texts are."""

_LEAST = 16  # fewest rows of a product on tensor cores
_MOST = {2: 64, 4: 32}  # rows of a program's product, by bytes of a number: a row and a query head each
_ROWS = 16  # most rows of a group: a tile of ancestors is read once for each
_FEW = 4  # rows of a group where there are few
_BUSY = 64  # programs: with 64 rows after 512 positions small groups took 8.6 instead of 10.6 ms on an H100
_TILE_BYTES = 16384  # of keys; with as much of values, twice, it fits into any current GPU's shared memory
# with 4 warps some shapes spill registers, in float32 by kilobytes
_CHUNKED = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}
_JOINED = {"num_warps": 1, "enable_fp_fusion": False}
_INTERPRETED = bool(triton.knobs.runtime.interpret)  # the interpreter multiplies the bits of bfloat16 as integers


class DeviceRows(NamedTuple):
    """What attention needs to know of a batch's rows, on the device, int32; see `engine.core.batch.Batch`.

    firsts: [rows + 1] where each group of rows begins (`grouped`).
    """

    prefix_lens: Tensor
    ancestor_ptr: Tensor
    ancestor_slots: Tensor
    tables: Tensor
    table_of: Tensor
    firsts: Tensor


def grouped(table_of: Int, most: int) -> Int:
    """[rows + 1] where each group begins: at most `most` consecutive rows of one request. Groups past the last are
    empty, so that there are as many for every batch of so many rows.
    """
    rows = np.arange(len(table_of))
    begins = np.flatnonzero(np.diff(table_of, prepend=-1))
    places = rows - np.repeat(begins, np.diff(begins, append=len(rows)))
    firsts = np.full(len(rows) + 1, len(rows), np.int32)
    starts = np.flatnonzero(places % most == 0)
    firsts[: len(starts)] = starts
    return firsts


@triton.jit
def _product(a, b, WIDENED: tl.constexpr):
    if WIDENED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _added(q, key, value, visible, peak, total, summed, scale, softcap, CAPPED: tl.constexpr, WIDENED: tl.constexpr):
    """peak, total and summed (see `_attend_chunk`) with a tile of keys added for the rows that it is visible to."""
    score = _product(q, key, WIDENED) * scale
    if CAPPED:  # cap * tanh(score / cap)
        score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (score / softcap)) + 1.0))
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: weights are 0, not NaN
    weight = tl.exp(score - base[:, None])
    kept = tl.exp(peak - base)
    # What a row does not see may be no number, such as a slot never written, and 0 x NaN is NaN.
    wide = value.to(tl.float32)
    value = tl.where(wide - wide == 0.0, value, 0.0)
    summed = summed * kept[:, None] + _product(weight.to(value.dtype), value, WIDENED)
    return higher, total * kept + tl.sum(weight, 1), summed


@triton.jit(do_not_specialize=["chunks"])
def _attend_chunk(
    query,  # [rows, kv_heads * q_per_kv, head_dim]
    keys,  # [blocks, kv_heads, dims, 16]
    values,  # [blocks, kv_heads, 16, dims]
    tables,
    table_of,
    prefix_lens,
    ancestor_ptr,
    ancestor_slots,
    firsts,
    peaks,  # out: [rows, heads, chunks] float32, the largest score
    totals,  # out: [rows, heads, chunks] float32, the sum of exp(score - peak)
    sums,  # out: [rows, heads, chunks, dims] float32, the sum of values times exp(score - peak)
    chunks,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    FILLED: tl.constexpr,  # rows of a product: a row and a query head each, row by row
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_FILLED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Attention of the queries of a group's rows to one chunk of one KV head."""
    first = tl.load(firsts + tl.program_id(0)).to(tl.int64)
    count = tl.load(firsts + tl.program_id(0) + 1) - first.to(tl.int32)
    if count == 0:
        return
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    low = chunk * CHUNK
    member = tl.arange(0, FILLED) // Q_PER_KV
    real = member < count
    prefix = tl.load(prefix_lens + first + member, mask=real, other=0)
    listing = tl.load(ancestor_ptr + first + member + 1, mask=real, other=0) - tl.load(
        ancestor_ptr + first + member, mask=real, other=0
    )
    seen = prefix + listing
    start = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    most = tl.max(seen, 0)
    least = tl.min(tl.where(real, start, most), 0)
    if low >= most or low + CHUNK <= least:
        return

    dim = tl.arange(0, DIMS_FILLED)
    lane = tl.arange(0, TILE)
    heads = (first + member) * (KV_HEADS * Q_PER_KV) + head * Q_PER_KV + tl.arange(0, FILLED) % Q_PER_KV
    q = tl.load(
        query + heads[:, None] * HEAD_DIM + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([FILLED], float("-inf"), tl.float32)
    total = tl.zeros([FILLED], tl.float32)
    summed = tl.zeros([FILLED, DIMS_FILLED], tl.float32)
    begin = tl.maximum(low, least // TILE * TILE)
    end = tl.minimum(low + CHUNK, most)
    # the first position that a row reads as an ancestor; tiles that end before it are shared
    own = tl.min(tl.where(listing > 0, prefix, most + TILE), 0)
    tiles = (end - begin + TILE - 1) // TILE
    shared = tl.minimum(tl.maximum((own - begin) // TILE, 0), tiles)
    of_head = head * (DIMS * BLOCK)
    table = tables + tl.load(table_of + first)
    inside = tl.arange(0, TILE // BLOCK)
    slots = tl.arange(0, BLOCK)
    for step in range(shared):
        at = begin + step * TILE
        # Whole blocks are read, so that keys come as vectors. What lies past the text is masked in the scores.
        block = tl.load(table + at // BLOCK + inside, mask=at + inside * BLOCK < most, other=0).to(tl.int64)
        place = block * (KV_HEADS * DIMS * BLOCK) + of_head
        key = tl.load(
            keys + place[None, :, None] + (dim[:, None, None] * BLOCK + slots[None, None, :]),
            mask=(dim < HEAD_DIM)[:, None, None],
            other=0.0,
        )
        value = tl.load(
            values + place[:, None, None] + (slots[None, :, None] * DIMS + dim[None, None, :]),
            mask=(dim < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        position = (at + lane)[None, :]
        peak, total, summed = _added(
            q,
            tl.reshape(key, [DIMS_FILLED, TILE]),
            tl.reshape(value, [TILE, DIMS_FILLED]),
            (position >= start[:, None]) & (position < seen[:, None]),
            peak, total, summed, scale, softcap, CAPPED, WIDENED,
        )  # fmt: skip
    for step in range((tiles - shared) * count):
        reader = first + step % count
        position = begin + (shared + step // count) * TILE + lane
        text = tl.load(prefix_lens + reader)
        path = tl.load(ancestor_ptr + reader)
        there = (position >= least) & (position < text + tl.load(ancestor_ptr + reader + 1) - path)
        ancestor = tl.load(ancestor_slots + path + position - text, mask=there & (position >= text), other=0)
        slot = tl.where(position < text, position, ancestor)
        block = tl.load(tables + tl.load(table_of + reader) + slot // BLOCK, mask=there, other=0).to(tl.int64)
        place = block * (KV_HEADS * DIMS * BLOCK) + of_head
        key = tl.load(
            keys + (place + slot % BLOCK)[None, :] + dim[:, None] * BLOCK,
            mask=there[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        value = tl.load(
            values + (place + slot % BLOCK * DIMS)[:, None] + dim[None, :],
            mask=there[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        first_seen = tl.where(first + member == reader, start, most)
        visible = (position[None, :] >= first_seen[:, None]) & (position[None, :] < seen[:, None])
        peak, total, summed = _added(
            q, key, value, visible, peak, total, summed, scale, softcap, CAPPED, WIDENED
        )  # fmt: skip
    place = heads * chunks + chunk
    tl.store(peaks + place, peak, mask=real)
    tl.store(totals + place, total, mask=real)
    tl.store(sums + place[:, None] * DIMS + dim[None, :], summed, mask=real[:, None] & (dim < DIMS)[None, :])


@triton.jit(do_not_specialize=["chunks"])
def _attend_joined(
    peaks,
    totals,
    sums,
    prefix_lens,
    ancestor_ptr,
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
    seen = tl.load(prefix_lens + row) + tl.load(ancestor_ptr + row + 1) - tl.load(ancestor_ptr + row)
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
    """Attention over a pool. q_per_kv: query heads per KV head."""

    def __init__(self, pool: KVPool, q_per_kv: int):
        self.pool, self.q_per_kv = pool, q_per_kv
        shape = pool.shape
        self._dims_filled = triton.next_power_of_2(shape.dims)
        row_bytes = self._dims_filled * shape.dtype.itemsize
        self._tile = max(_LEAST, min(64, _TILE_BYTES // row_bytes))  # divides CHUNK: both are powers of two
        self._large = max(1, min(_ROWS, _MOST[shape.dtype.itemsize] // q_per_kv))
        # for all groups: products of another size could add in another order
        self._filled = max(_LEAST, triton.next_power_of_2(self._large * q_per_kv))

    def together(self, rows: int, chunks: int) -> int:
        """Most rows of a group, of so many rows: few where large groups would leave much of a GPU idle, since a program
        reads the tiles with its rows' ancestors one after the other.
        """
        programs = -(-rows // self._large) * self.pool.shape.kv_heads * chunks
        return self._large if programs > _BUSY else min(self._large, _FEW)

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
            rows.prefix_lens,
            rows.ancestor_ptr,
            rows.ancestor_slots,
            rows.firsts,
            peaks,
            totals,
            scratch,
            chunks,
            rule.window,
            rule.scale,
            rule.softcap,
            KV_HEADS=shape.kv_heads,
            Q_PER_KV=self.q_per_kv,
            FILLED=self._filled,
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
            rows.prefix_lens,
            rows.ancestor_ptr,
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
