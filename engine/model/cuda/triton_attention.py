"""The exact attention of `engine.kernels.attention.attention` on CUDA, as Triton kernels.

It reads the same pool and the same arrays of a batch, and gives the same guarantee: a row's result is a function of its
own visible keys in the order of positions, and of nothing else. Positions are counted in a row's own sequence, first
its text and then its ancestors in the tree, and are added up in tiles of a fixed size within chunks of 512. The chunks
are joined in order. So neither the other rows nor the lengths of other texts change the order of summation.

Two kernels share the work. `_attend_texts` adds up the tiles that hold nothing but text, for a group of rows of one
request at once: a list of (group, chunk) pairs is spread over as many programs as the device runs at once, so that one
graph serves texts of every length. `_attend_rows` goes on from there, row by row: it adds the row's own tiles, which
hold an ancestor, to what the chunk has so far, and joins the chunks.

A tile that a row does not see adds zeros to what it has, which leaves its bits as they are; so how rows are grouped
changes nothing. A row that sees an infinity or NaN has NaN as its result, and the others do not.

CUDA builds of torch bring Triton; without a GPU the tests run these kernels through Triton's interpreter, and compile
them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.core.batch import BLOCK_SIZE, Int
from engine.core.kv_shape import KVShape
from engine.kernels.attention.attention import Rule
from engine.model.cuda.device_rows import DeviceRows, Work, grouped, sums_before
from engine.model.kv_pool import KVPool

CHUNK = 512
"""Positions that are added up before they are joined to those before them: fixed, so that a row's sum does not depend
on how long other texts are.
"""

_LEAST = 16  # fewest rows of a product on tensor cores
_MOST, _MOST_WGMMA = 32, 64  # rows of a program's product: a row and a query head each
_ROWS = 16  # most rows of a group
_TILE_BYTES = 16384  # bytes of keys; with as much of values, twice, a tile fits into any current GPU's shared memory
_SCRATCH_BYTES = 512 << 20  # bytes of the chunks' sums; more rows than fit go one after the other
_SCRATCH_SHARE = 4  # these may take one part in so many of what keys and values take
_PROGRAMS = 2  # programs for each multiprocessor
_FEW_PROGRAMS = 3  # programs where there is no GPU
_WARPS = {2: 4, 4: 8}  # of a program that reads texts, by bytes of a number
# With so many registers two programs fit on a multiprocessor; the assembler alone would take fewer and spill some.
_REGISTERS = {} if torch.version.hip else {"maxnreg": 255}  # AMD's compiler has no such option
_LAUNCH = {"num_stages": 2, "enable_fp_fusion": False, **_REGISTERS}
_INTERPRETED = bool(triton.knobs.runtime.interpret)  # the interpreter multiplies the bits of bfloat16 as integers


@triton.jit
def _product(a, b, WIDENED: tl.constexpr):
    if WIDENED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _added(q, key, value, visible, peak, total, summed, scale, softcap, CAPPED: tl.constexpr, WIDENED: tl.constexpr):
    """Return peak, total and summed (see `_attend_texts`) with a tile of keys added for the rows that it
    is visible to.
    """
    score = _product(q, key, WIDENED) * scale
    if CAPPED:  # cap * tanh(score / cap)
        score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (score / softcap)) + 1.0))
    # A slot that a row does not see may hold NaN, such as a slot never written, and 0 x NaN is NaN: such values are
    # taken as zeros. The score of a row that does see one becomes NaN in their place.
    if value.dtype.primitive_bitwidth == 16:
        not_finite = (value.to(tl.int16, bitcast=True) & 0x7F80) == 0x7F80
    else:
        not_finite = (value.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    value = tl.where(not_finite, 0.0, value)
    spoils = tl.max(not_finite.to(tl.int32), 1) > 0
    score = tl.where(visible, tl.where(spoils[None, :], float("nan"), score), float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # the row sees nothing yet: weights are 0, not NaN
    weight = tl.exp(score - base[:, None])
    kept = tl.exp(peak - base)
    summed = summed * kept[:, None] + _product(weight.to(value.dtype), value, WIDENED)
    return higher, total * kept + tl.sum(weight, 1), summed


@triton.jit
def _span(prefix_lens, ancestor_ptr, rows, real, window, TILE: tl.constexpr):
    """Return, for each row, the first position that it sees, where its own tiles begin, and how many positions there
    are.
    """
    prefix = tl.load(prefix_lens + rows, mask=real, other=0)
    listing = tl.load(ancestor_ptr + rows + 1, mask=real, other=0) - tl.load(ancestor_ptr + rows, mask=real, other=0)
    seen = prefix + listing
    start = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    return start, tl.where(listing > 0, prefix // TILE * TILE, seen), seen


@triton.jit
def _attend_texts(
    query,  # [rows, kv_heads * q_per_kv, head_dim]
    keys,  # [blocks, kv_heads, dims, 16]
    values,  # [blocks, kv_heads, 16, dims]
    listed,
    table_of,
    prefix_lens,
    ancestor_ptr,
    firsts,
    pairs,
    parts,
    peaks,  # out: [parts, heads] float32, the largest score
    totals,  # out: [parts, heads] float32, the sum of exp(score - peak)
    sums,  # out: [parts, heads, dims] float32, the sum of values times exp(score - peak)
    window,
    scale,
    softcap,
    ROWS: tl.constexpr,
    ROWS_FILLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    FILLED: tl.constexpr,  # rows of a product: a row and a query head each, row by row
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_FILLED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Add up what the queries of groups of rows see in tiles of text, chunk by chunk and KV head by KV head."""
    place_of_group = tl.arange(0, ROWS_FILLED)
    ends = tl.load(pairs + 1 + place_of_group, mask=place_of_group < ROWS, other=2147483647)
    count = tl.load(pairs + ROWS) * KV_HEADS
    member = tl.arange(0, FILLED) // Q_PER_KV
    dim = tl.arange(0, DIMS_FILLED)
    lane = tl.arange(0, TILE)
    inside = tl.arange(0, TILE // BLOCK_SIZE)
    slots = tl.arange(0, BLOCK_SIZE)
    for item in range(tl.program_id(0), count, PROGRAMS):
        pair = item // KV_HEADS
        head = item % KV_HEADS
        group = tl.sum((ends <= pair).to(tl.int32), 0)
        chunk = pair - tl.load(pairs + group)
        low = chunk * CHUNK
        first = tl.load(firsts + group).to(tl.int64)
        real = member < tl.load(firsts + group + 1) - first.to(tl.int32)
        start, split, _ = _span(prefix_lens, ancestor_ptr, first + member, real, window, TILE)
        most = tl.max(split, 0)
        begin = tl.maximum(low, tl.min(tl.where(real, start, most), 0) // TILE * TILE)
        end = tl.minimum(low + CHUNK, most)
        if begin < end:
            heads = head * Q_PER_KV + tl.arange(0, FILLED) % Q_PER_KV
            q = tl.load(
                query + ((first + member) * (KV_HEADS * Q_PER_KV) + heads)[:, None] * HEAD_DIM + dim[None, :],
                mask=real[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            peak = tl.full([FILLED], float("-inf"), tl.float32)
            total = tl.zeros([FILLED], tl.float32)
            summed = tl.zeros([FILLED, DIMS_FILLED], tl.float32)
            table = listed + tl.load(table_of + first)
            for at in range(begin, end, TILE):
                # Whole blocks are read, so that keys come as vectors. What lies past the text is masked in the scores.
                there = at + inside * BLOCK_SIZE < most
                block = tl.load(table + at // BLOCK_SIZE + inside, mask=there, other=0).to(tl.int64)
                place = block * (KV_HEADS * DIMS * BLOCK_SIZE) + head * (DIMS * BLOCK_SIZE)
                key = tl.load(
                    keys + place[None, :, None] + (dim[:, None, None] * BLOCK_SIZE + slots[None, None, :]),
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
                    (position >= start[:, None]) & (position < split[:, None]),
                    peak, total, summed, scale, softcap, CAPPED, WIDENED,
                )  # fmt: skip
            has = real & (low < split)
            part = tl.load(parts + first + member, mask=real, other=0).to(tl.int64) + chunk
            out = part * (KV_HEADS * Q_PER_KV) + heads
            tl.store(peaks + out, peak, mask=has)
            tl.store(totals + out, total, mask=has)
            tl.store(sums + out[:, None] * DIMS + dim[None, :], summed, mask=has[:, None] & (dim < DIMS)[None, :])


@triton.jit
def _attend_rows(
    query,
    keys,
    values,
    listed,
    table_of,
    prefix_lens,
    ancestor_ptr,
    parts,
    peaks,
    totals,
    sums,
    sinks,  # [heads] float32
    out,  # [rows, heads, head_dim]
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    Q_PER_KV: tl.constexpr,
    FILLED: tl.constexpr,  # rows of a product: a query head each
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_FILLED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Join the chunks of one row and one KV head in order. The tiles with the row's ancestors are added to their chunk
    first. A padding row sees nothing and becomes zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start, split, seen = _span(prefix_lens, ancestor_ptr, row, True, window, TILE)
    text = tl.load(prefix_lens + row)
    path = tl.load(ancestor_ptr + row)
    table = listed + tl.load(table_of + row)
    part = tl.load(parts + row).to(tl.int64)
    member = tl.arange(0, FILLED)
    real = member < Q_PER_KV
    heads = head * Q_PER_KV + member
    dim = tl.arange(0, DIMS_FILLED)
    lane = tl.arange(0, TILE)
    q = tl.load(
        query + (row * (KV_HEADS * Q_PER_KV) + heads)[:, None] * HEAD_DIM + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([FILLED], float("-inf"), tl.float32)
    total = tl.zeros([FILLED], tl.float32)
    summed = tl.zeros([FILLED, DIMS_FILLED], tl.float32)
    for chunk in range(start // CHUNK, (seen + CHUNK - 1) // CHUNK):
        low = chunk * CHUNK
        known = real & (tl.maximum(low, start) < split)
        place = (part + chunk) * (KV_HEADS * Q_PER_KV) + heads
        here = tl.load(peaks + place, mask=known, other=float("-inf"))
        more = tl.load(totals + place, mask=known, other=0.0)
        added = tl.load(
            sums + place[:, None] * DIMS + dim[None, :], mask=known[:, None] & (dim < DIMS)[None, :], other=0.0
        )
        for at in range(tl.maximum(low, tl.maximum(split, start // TILE * TILE)), tl.minimum(low + CHUNK, seen), TILE):
            position = at + lane
            there = (position >= start) & (position < seen)
            ancestor = tl.load(listed + path + position - text, mask=there & (position >= text), other=0)
            slot = tl.where(position < text, position, ancestor)
            block = tl.load(table + slot // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            at_block = block * (KV_HEADS * DIMS * BLOCK_SIZE) + head * (DIMS * BLOCK_SIZE)
            key = tl.load(
                keys + (at_block + slot % BLOCK_SIZE)[None, :] + dim[:, None] * BLOCK_SIZE,
                mask=there[None, :] & (dim < HEAD_DIM)[:, None],
                other=0.0,
            )
            value = tl.load(
                values + (at_block + slot % BLOCK_SIZE * DIMS)[:, None] + dim[None, :],
                mask=there[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            here, more, added = _added(
                q, key, value, there[None, :], here, more, added, scale, softcap, CAPPED, WIDENED
            )  # fmt: skip
        higher = tl.maximum(peak, here)
        kept, share = tl.exp(peak - higher), tl.exp(here - higher)
        total = total * kept + more * share
        summed = summed * kept[:, None] + added * share[:, None]
        peak = higher
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0)
        higher = tl.maximum(peak, sink)
        kept = tl.exp(peak - higher)
        total = total * kept + tl.exp(sink - higher)
        summed = summed * kept[:, None]
    total = tl.where(seen > 0, total, 1.0)
    tl.store(
        out + (row * (KV_HEADS * Q_PER_KV) + heads)[:, None] * HEAD_DIM + dim[None, :],
        summed / total[:, None],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
    )


def has_wgmma(device: torch.device) -> bool:
    """Return whether groups of warps multiply there: 64 rows at once, which elsewhere spill registers."""
    return device.type != "cuda" or bool(torch.cuda.get_device_capability(device)[0] >= 9)


class TritonAttention:
    """Attention over a pool. q_per_kv: query heads per KV head. rows: most rows of a forward.

    capacity: chunks, of all rows together, that fit into one call.
    """

    def __init__(self, pool: KVPool, q_per_kv: int, rows: int = 1):
        self.pool, self.q_per_kv = pool, q_per_kv
        shape, device = pool.shape, pool.keys.device
        self._dims_filled = triton.next_power_of_2(shape.dims)
        row_bytes = self._dims_filled * shape.dtype.itemsize
        self._tile = max(_LEAST, min(64, _TILE_BYTES // row_bytes))  # divides CHUNK: both are powers of two
        most = _MOST_WGMMA if shape.dtype.itemsize == 2 and has_wgmma(device) else _MOST
        self._large = max(1, min(_ROWS, most // q_per_kv))
        # One size for all groups: products of another size could add in another order.
        self._filled = max(_LEAST, triton.next_power_of_2(self._large * q_per_kv))
        self._few = max(_LEAST, triton.next_power_of_2(q_per_kv))  # rows of a product for one row's own tiles
        self._programs = _FEW_PROGRAMS
        if device.type == "cuda":
            self._programs = _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
        longest = -(-pool.blocks * BLOCK_SIZE // CHUNK)
        part_bytes = q_per_kv * shape.kv_heads * (shape.dims + 2) * 4
        room = min(_SCRATCH_BYTES, (pool.keys.nbytes + pool.values.nbytes) // _SCRATCH_SHARE) // part_bytes
        self.reserve(max(longest, min(room, rows * longest)))

    def reserve(self, parts: int) -> None:
        """Reserve scratch for so many chunks; work that was captured before has to be captured anew."""
        shape, device = self.pool.shape, self.pool.keys.device
        heads = self.q_per_kv * shape.kv_heads
        self.capacity = parts
        self._peaks, self._totals = (torch.empty(parts, heads, dtype=torch.float32, device=device) for _ in range(2))
        self._sums = torch.empty(parts, heads, shape.dims, dtype=torch.float32, device=device)

    def chunks_of(self, prefix_lens: Int, listing: Int) -> Int:
        """Return [rows]: the chunks in which each row sees tiles of text. listing: [rows], how many ancestors each row
        has.
        """
        text_ends = np.where(listing > 0, prefix_lens // self._tile * self._tile, prefix_lens)
        chunks: Int = -(-text_ends // CHUNK)
        return chunks

    def work(self, table_of: Int, chunks: Int, size: int) -> Work:
        """Return how the rows' text is divided. chunks: see `chunks_of`. size: rows of the forward, those that pad it
        included: they get nothing.
        """
        firsts = np.full(size + 1, len(table_of), np.int32)
        firsts[: len(table_of) + 1] = grouped(table_of, self._large)
        starts = firsts[firsts < len(table_of)]
        return Work(firsts, sums_before(np.maximum.reduceat(chunks, starts), size), sums_before(chunks, size))

    def choose_products(self) -> bool:
        """Multiply a row's own tiles in a product of few rows, if that gives the bits that it gives among many; return
        whether it does. A row may be read as text or as a node of a tree, and has to be the same.
        """
        shape, device = self.pool.shape, self.pool.keys.device
        seen = 3 * self._tile - 5
        pool = KVPool(KVShape(1, shape.kv_heads, shape.head_dim, shape.dtype), -(-seen // BLOCK_SIZE), device)
        generator, heads = torch.Generator().manual_seed(0), self.q_per_kv * shape.kv_heads
        for part in (pool.keys, pool.values):
            part.copy_(torch.randn(part.shape, generator=generator))
        query = torch.randn(1, heads, shape.head_dim, generator=generator).to(pool.keys)
        probe = TritonAttention(pool, self.q_per_kv)
        as_text, as_node = (probe(probe._row(seen, text), 0, Rule(0.2), query) for text in (seen, 1))
        self._few = probe._few if torch.equal(as_text, as_node) else self._filled
        return bool(self._few < self._filled)

    def _row(self, seen: int, text: int) -> DeviceRows:
        """Return a row that sees `seen` slots of the pool: the first `text` of them as text, the rest as ancestors."""
        blocks, listing = self.pool.blocks, np.array([seen - text], np.int32)
        work = self.work(np.zeros(1, np.int32), self.chunks_of(np.array([text], np.int32), listing), 1)
        arrays = [text], [blocks, blocks + seen - text], [0], *work, [*range(blocks), *range(text, seen)]
        return DeviceRows(*(torch.tensor(each, dtype=torch.int32, device=self.pool.keys.device) for each in arrays))

    def __call__(self, rows: DeviceRows, layer: int, rule: Rule, query: Tensor) -> Tensor:
        """Attend with each row's queries to the layer's keys and values. query, result: [rows, heads, head_dim].

        The rows see no more chunks than there is `capacity` for.
        """
        shape, count = self.pool.shape, len(query)
        out, scratch = torch.empty_like(query), (self._peaks, self._totals, self._sums)
        common = {
            "KV_HEADS": shape.kv_heads, "Q_PER_KV": self.q_per_kv, "HEAD_DIM": shape.head_dim, "DIMS": shape.dims,
            "DIMS_FILLED": self._dims_filled, "TILE": self._tile, "CHUNK": CHUNK, "BLOCK_SIZE": BLOCK_SIZE,
            "CAPPED": rule.softcap != 0, "WIDENED": _INTERPRETED,
        }  # fmt: skip
        read = query, self.pool.keys[layer], self.pool.values[layer], rows.listed, rows.table_of, rows.prefix_lens
        _attend_texts[(self._programs,)](
            *read,
            rows.ancestor_ptr,
            rows.firsts,
            rows.pairs,
            rows.parts,
            *scratch,
            rule.window,
            rule.scale,
            rule.softcap,
            ROWS=count,
            ROWS_FILLED=triton.next_power_of_2(count),
            PROGRAMS=self._programs,
            FILLED=self._filled,
            num_warps=_WARPS[shape.dtype.itemsize],
            **common,
            **_LAUNCH,
        )
        _attend_rows[(count, shape.kv_heads)](
            *read,
            rows.ancestor_ptr,
            rows.parts,
            *scratch,
            self._peaks if rule.sinks is None else rule.sinks,
            out,
            rule.window,
            rule.scale,
            rule.softcap,
            FILLED=self._few,
            SINKS=rule.sinks is not None,
            num_warps=4,
            **common,
            **_LAUNCH,
        )
        return out
