"""Exact attention: a row's result depends on the keys that it sees, in the order of positions, and on nothing else.

Not on the rows beside it, the slots that its keys lie in, padding, or threads. So a token's logits are the same bits
whether it was decoded alone, verified in a tree with rejected siblings, or read with its prompt, beside any requests.

A row sees the first `prefix` positions of its request's text and then a list of `others`, its ancestors in the tree.
No mask is needed. Keys lie in blocks of 16 positions (`engine.model.kv_pool`): scores are computed for 16 keys at once,
each lane adding over the dimensions in their order; weights are summed in 16 lanes by position; values are added one by
one in the order of positions. Queries of the heads that share keys, and of neighbouring rows, share the loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.batch import BLOCK, Batch
from engine.model.kv_pool import KVPool
from engine.model.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    divide,
    exp,
    float_at,
    fma,
    int_at,
    largest,
    load,
    maximum,
    multiply,
    put_float,
    put_half,
    scores_of,
    splat,
    store,
    total,
    weigh,
)
from engine.model.team import address_of, kernel, member, members

VECTORS = 12  # queries whose scores are computed in one pass over the keys
_SLAB = 4  # vectors of 16 dimensions whose sums are kept in registers at once
_FEW = 6  # queries for which they are

ATTENTION = np.dtype(
    [
        (name, "i8")
        for name in (
            # addresses
            "queries",  # [kv_heads, rows, groups, dims] float32
            "keys",  # [blocks, kv_heads, dims, 16]
            "values",  # [blocks, kv_heads, 16, dims]
            "tables",  # int32: each request's blocks
            "rows_table",  # [rows] int32: where in `tables` the row's request begins
            "rows_prefix",  # [rows] int32
            "rows_others",  # [rows + 1] int32: where in `others` the row's list begins
            "others",  # int32: places in the request's slots, ascending
            "tiles",  # [tiles + 1] int32: the first row of each tile; a tile's rows are of one request
            "sinks",  # [heads] float32, or 0
            "scratch",  # [threads, scratch_bytes]
            "out",  # [rows, heads * head_dim]
            # sizes
            "tile_count",
            "rows",
            "kv_heads",
            "groups",
            "dims",  # head_dim, rounded up to a multiple of 16
            "head_dim",
            "width",  # bytes of a number in keys, values and out
            "window",  # positions that a row sees, itself included; 0: all
            "scratch_bytes",
            "capacity",  # scores in a row of scratch
        )
    ]
    + [("scale", "f4"), ("softcap", "f4")]  # softcap 0: none
)


@kernel(ATTENTION)
def attention_kernel(address: Any) -> None:
    """Units of work are pairs of a tile and a head of keys."""
    work = carray(address, 1)[0]
    team = members()
    for unit in range(member(), work.tile_count * work.kv_heads, team):
        _attend(work, unit // work.kv_heads, unit % work.kv_heads, work.scratch + member() * work.scratch_bytes)


@njit
def _attend(work: Any, tile: int, head: int, scratch: int) -> None:
    """All rows of a tile with one head of keys and the query heads that share it."""
    first, end = int_at(work.tiles + 4 * tile), int_at(work.tiles + 4 * tile + 4)
    count = (end - first) * work.groups
    scores, step = scratch, work.capacity * 4
    sums = scratch + count * step
    queries = work.queries + (head * work.rows + first) * work.groups * work.dims * 4
    table = work.tables + 4 * int_at(work.rows_table + 4 * first)

    low, high, reach = 1 << 40, 0, 1 << 40  # positions that some row sees, slots it looks at; reach: of common prefix
    lows = 0
    for row in range(first, end):
        start = _start(work, row)
        low, lows = min(low, start), max(lows, start)
        reach = min(reach, int_at(work.rows_prefix + 4 * row))
        high = max(high, _last_slot(work, row) + 1)

    for block in range(low // LANES, (high + LANES - 1) // LANES):
        at = (int_at(table + 4 * block) * work.kv_heads + head) * work.dims * LANES * work.width
        _scores(work, count, queries, work.keys + at, scores + 4 * LANES * block, step)

    for row in range(first, end):
        for group in range(work.groups):
            vector = (row - first) * work.groups + group
            sum_of = _softmax(work, row, head * work.groups + group, scores + vector * step)
            for i in range(0, work.dims, LANES):
                store(splat(np.float32(0)), sums + (vector * work.dims + i) * 4, FLOAT32)
            put_float(sums + (count * work.dims + vector) * 4, sum_of)

    for row in range(first, end):  # from the row's own start to where all rows see what follows
        vector = (row - first) * work.groups
        stop = min(lows, int_at(work.rows_prefix + 4 * row))
        _add_values(work, table, head, work.groups, _start(work, row), stop, scores, step, sums, vector)
    if lows < reach:
        _add_values(work, table, head, count, lows, reach, scores, step, sums, 0)
    for row in range(first, end):
        vector, prefix = (row - first) * work.groups, int_at(work.rows_prefix + 4 * row)
        start = max(lows, reach, _start(work, row)) if lows < reach else max(lows, _start(work, row))
        _add_values(work, table, head, work.groups, start, prefix, scores, step, sums, vector)
        begin = int_at(work.rows_others + 4 * row)
        for i in range(int_at(work.rows_others + 4 * row + 4) - begin):
            if prefix + i >= _start(work, row):
                slot = int_at(work.others + 4 * (begin + i))
                _add_value(work, table, head, slot, prefix + i, scores, step, sums, vector)

    for row in range(first, end):
        for group in range(work.groups):
            vector = (row - first) * work.groups + group
            share = divide(splat(np.float32(1)), splat(float_at(sums + (count * work.dims + vector) * 4)))
            place = work.out + ((row * work.kv_heads + head) * work.groups + group) * work.head_dim * work.width
            _put(work, sums + vector * work.dims * 4, share, place)


@njit
def _start(work: Any, row: int) -> Any:
    """The first position that the row sees."""
    if work.window == 0:
        return 0
    seen = int_at(work.rows_prefix + 4 * row)
    seen += int_at(work.rows_others + 4 * row + 4) - int_at(work.rows_others + 4 * row)
    return max(0, seen - work.window)


@njit
def _last_slot(work: Any, row: int) -> Any:
    last, end = int_at(work.rows_prefix + 4 * row) - 1, int_at(work.rows_others + 4 * row + 4)
    if end > int_at(work.rows_others + 4 * row):
        last = max(last, int_at(work.others + 4 * (end - 1)))
    return last


@njit
def _scores(work: Any, count: int, queries: int, keys: int, scores: int, step: int) -> None:
    """The products of `count` queries with one block of keys."""
    done = 0
    dims = work.dims
    if work.width == BFLOAT16:
        while count - done >= VECTORS:
            scores_of(12, BFLOAT16, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += VECTORS
        while count - done >= 4:
            scores_of(4, BFLOAT16, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 4
        while count - done >= 3:
            scores_of(3, BFLOAT16, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 3
        while count > done:
            scores_of(1, BFLOAT16, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 1
    else:
        while count - done >= VECTORS:
            scores_of(12, FLOAT32, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += VECTORS
        while count - done >= 4:
            scores_of(4, FLOAT32, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 4
        while count > done:
            scores_of(1, FLOAT32, dims, queries + done * dims * 4, keys, scores + done * step, step)
            done += 1


@njit
def _softmax(work: Any, row: int, head: int, scores: int) -> Any:
    """Put exp(score - largest) in the place of each score the row sees, by position; return their sum."""
    prefix, begin = int_at(work.rows_prefix + 4 * row), int_at(work.rows_others + 4 * row)
    seen = prefix + int_at(work.rows_others + 4 * row + 4) - begin
    for i in range(seen - prefix):  # their slots ascend and are never before their positions
        put_float(scores + 4 * (prefix + i), float_at(scores + 4 * int_at(work.others + 4 * (begin + i))))
    start = _start(work, row)
    low = start // LANES * LANES
    high = (seen + LANES - 1) // LANES * LANES
    for position in range(low, start):
        put_float(scores + 4 * position, np.float32(-np.inf))
    for position in range(seen, high):
        put_float(scores + 4 * position, np.float32(-np.inf))

    scale, cap = splat(work.scale), splat(work.softcap)
    peak = splat(np.float32(-np.inf))
    for position in range(low, high, LANES):
        x = multiply(load(scores + 4 * position, FLOAT32), scale)
        if work.softcap != 0:  # cap * tanh(x / cap)
            one = splat(np.float32(1))
            raised = exp(multiply(divide(x, cap), splat(np.float32(2))))
            x = multiply(cap, fma(splat(np.float32(-2)), divide(one, add(raised, one)), one))
            if position < start or position + LANES > seen:  # what is not seen stays so
                x = _hide(x, scores + 4 * position, position, start, seen)
        store(x, scores + 4 * position, FLOAT32)
        peak = maximum(x, peak)
    top = largest(peak)
    if work.sinks != 0:
        top = max(top, float_at(work.sinks + 4 * head))
    sums = splat(np.float32(0))
    negative = splat(-top)
    for position in range(low, high, LANES):
        weight = exp(add(load(scores + 4 * position, FLOAT32), negative))
        store(weight, scores + 4 * position, FLOAT32)
        sums = add(sums, weight)
    sum_of = total(sums)
    if work.sinks != 0:
        sum_of += largest(exp(splat(float_at(work.sinks + 4 * head) - top)))
    return sum_of


@njit
def _hide(x: Any, place: int, position: int, start: int, seen: int) -> Any:
    store(x, place, FLOAT32)
    for lane in range(LANES):
        if position + lane < start or position + lane >= seen:
            put_float(place + 4 * lane, np.float32(-np.inf))
    return load(place, FLOAT32)


@njit
def _add_values(
    work: Any, table: int, head: int, count: int, start: int, end: int, scores: int, step: int, sums: int, vector: int
) -> None:
    """Add the values at positions start to end, weighed, to the sums of `count` queries from `vector` on."""
    position = start
    while position < end:
        block, lane = position // LANES, position % LANES
        many = min(LANES - lane, end - position)
        _weigh(work, table, head, block, lane, many, count, position, scores, step, sums, vector)
        position += many


@njit
def _add_value(
    work: Any, table: int, head: int, slot: int, position: int, scores: int, step: int, sums: int, vector: int
) -> None:
    """Add the value in `slot`, weighed by the score at `position`, to the sums of one row's queries."""
    _weigh(work, table, head, slot // LANES, slot % LANES, 1, work.groups, position, scores, step, sums, vector)


@njit
def _weigh(
    work: Any,
    table: int,
    head: int,
    block: int,
    lane: int,
    many: int,
    count: int,
    position: int,
    scores: int,
    step: int,
    sums: int,
    vector: int,
) -> None:
    dims, width = work.dims, work.width
    at = (int_at(table + 4 * block) * work.kv_heads + head) * dims * LANES
    values = work.values + (at + lane * dims) * width
    slab = _SLAB * LANES
    for first in range(0, dims, slab):
        done = 0
        while done < count:
            weights = scores + (vector + done) * step + 4 * position
            place = sums + ((vector + done) * dims + first) * 4
            here = values + first * width
            if dims - first < slab:  # a narrower rest, 16 dimensions at a time
                for i in range(0, dims - first, LANES):
                    if width == BFLOAT16:
                        weigh(1, 1, BFLOAT16, dims, weights, step, many, here + i * width, place + 4 * i)
                    else:
                        weigh(1, 1, FLOAT32, dims, weights, step, many, here + i * width, place + 4 * i)
                done += 1
            elif count - done >= _FEW and width == BFLOAT16:
                weigh(6, 4, BFLOAT16, dims, weights, step, many, here, place)
                done += 6
            elif count - done >= 3 and width == BFLOAT16:
                weigh(3, 4, BFLOAT16, dims, weights, step, many, here, place)
                done += 3
            elif width == BFLOAT16:
                weigh(1, 4, BFLOAT16, dims, weights, step, many, here, place)
                done += 1
            elif count - done >= 3:
                weigh(3, 4, FLOAT32, dims, weights, step, many, here, place)
                done += 3
            else:
                weigh(1, 4, FLOAT32, dims, weights, step, many, here, place)
                done += 1


@njit
def _put(work: Any, sums: int, share: Any, place: int) -> None:
    """The sums, each times `share`, to the output."""
    whole = work.head_dim // LANES * LANES
    for i in range(0, whole, LANES):
        x = multiply(load(sums + 4 * i, FLOAT32), share)
        if work.width == BFLOAT16:
            store(x, place + i * 2, BFLOAT16)
        else:
            store(x, place + i * 4, FLOAT32)
    if whole < work.head_dim:  # the rest of a head size that 16 does not divide
        store(multiply(load(sums + 4 * whole, FLOAT32), share), sums + 4 * whole, FLOAT32)
        for i in range(whole, work.head_dim):
            if work.width == BFLOAT16:
                put_half(place + i * 2, float_at(sums + 4 * i))
            else:
                put_float(place + i * 4, float_at(sums + 4 * i))


@dataclass(frozen=True)
class Rule:
    """How one layer attends. window: positions a row sees, itself included, 0: all. softcap: of scores, 0: none."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class Attention:
    """Attention of one batch after the other over a pool. groups: query heads for each head of keys."""

    def __init__(self, pool: KVPool, groups: int):
        self.pool, self.groups = pool, groups
        self._work = np.zeros(pool.shape.layers, ATTENTION)  # a record for each layer
        shape, work = pool.shape, self._work
        for name, value in (("kv_heads", shape.kv_heads), ("groups", groups), ("dims", shape.dims)):
            work[name] = value
        work["head_dim"], work["width"] = shape.head_dim, shape.dtype.itemsize
        self._layer_bytes = [tensor[0].nbytes for tensor in (pool.keys, pool.values)]
        self.queries = torch.zeros(0)
        self._scratch = np.zeros(0, np.uint8)
        self._tiles = np.zeros(1, np.int32)
        self.batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        """The batch that the next calls are about."""
        shape, work, rows = self.pool.shape, self._work, len(batch)
        of_tile = max(1, VECTORS // self.groups)
        self.batch, self._tiles = batch, batch.tiles(of_tile)
        if self.queries.numel() < (needed := rows * self.groups * shape.kv_heads * shape.dims):
            self.queries = torch.zeros(needed)
        vectors = min(of_tile, rows) * self.groups
        capacity = max(len(segment.cache.table) for segment in batch.segments) * BLOCK
        bytes_each = -(-vectors * (capacity + shape.dims + 1) * 4 // 64) * 64 + 64
        if len(self._scratch) < (needed := bytes_each * torch.get_num_threads()):
            self._scratch = np.zeros(needed, np.uint8)
        for name, array in (
            ("tables", batch.tables),
            ("rows_table", batch.table_of),
            ("rows_prefix", batch.prefixes),
            ("rows_others", batch.others),
            ("others", batch.listed),
            ("tiles", self._tiles),
            ("scratch", self._scratch),
        ):
            work[name] = array.ctypes.data
        work["queries"] = self.queries.data_ptr()
        work["tile_count"], work["rows"] = len(self._tiles) - 1, rows
        work["scratch_bytes"], work["capacity"] = bytes_each, capacity

    def layer_addresses(self, layer: int) -> tuple[int, int]:
        """Where the layer's keys and values begin."""
        keys, values = self._layer_bytes
        return self.pool.keys.data_ptr() + layer * keys, self.pool.values.data_ptr() + layer * values

    def attend(self, layer: int, rule: Rule, out: Tensor) -> None:
        """What each row's query, in `queries`, finds in the layer's keys and values: [rows, heads * head_dim]."""
        address = self.record(layer, rule, out)
        attention_kernel()(address, (len(self._tiles) - 1) * self.pool.shape.kv_heads)

    def record(self, layer: int, rule: Rule, out: Tensor) -> int:
        """The address of the kernel's record for this layer, which holds for the batches to come too."""
        record = self._work[layer]
        record["keys"], record["values"] = self.layer_addresses(layer)
        record["window"], record["scale"], record["softcap"] = rule.window, rule.scale, rule.softcap
        record["sinks"] = 0 if rule.sinks is None else rule.sinks.data_ptr()
        record["out"] = out.data_ptr()
        return address_of(self._work, layer)
