"""The places of keys and values in the pool: writing them to a slot, and copying them from slot to slot.

A block of the pool has sixteen slots. Its keys lie dimension by dimension and its values slot by slot; in pairs
(`vnni`) two dimensions of a key, and two slots of a value, lie together.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from engine.kernels.records import record_of
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    copy_half,
    float_at,
    int_at,
    load,
    number_at,
    put_float,
    put_half,
    put_number,
    store,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id


@subroutine
def _key_place(i: int, lane: int, vnni: int) -> Any:
    """Return the index of a key's dimension i within a block's keys."""
    return i // 2 * 2 * LANES + lane * 2 + i % 2 if vnni != 0 else i * LANES + lane


@subroutine
def _value_place(i: int, lane: int, vnni: int, dims: int) -> Any:
    """Return the index of a value's dimension i within a block's values."""
    if vnni != 0:
        return i // LANES * LANES * LANES + lane // 2 * 2 * LANES + i % LANES * 2 + lane % 2
    return lane * dims + i


@subroutine
def put_key(work: Any, key: int, block: int, lane: int) -> None:
    """Write one head's key, [dims] float32, to its lane of a block. The source is overwritten."""
    if work.vnni != 0:
        put_halves(key, work.dims, key)
        for i in range(0, work.dims, 2):  # a pair is four bytes
            put_float(block + _key_place(i, lane, 1) * 2, float_at(key + 2 * i))
    else:
        for i in range(work.head_dim):
            put_number(block + _key_place(i, lane, 0) * work.width, float_at(key + 4 * i), work.width)


@subroutine
def put_value(work: Any, value: int, block: int, lane: int) -> None:
    for i in range(work.head_dim):
        place = _value_place(i, lane, work.vnni, work.dims)
        _copy(value + i * work.width, block + place * work.width, work.width)


@subroutine
def _copy(source: int, place: int, width: int) -> None:
    """Copy one number."""
    if width == BFLOAT16:
        copy_half(source, place)
    else:
        put_float(place, float_at(source))


@subroutine
def put_halves(x: int, count: int, place: int) -> None:
    """Convert `count` float32 numbers, a multiple of 16, to bfloat16, possibly in place."""
    for i in range(0, count, LANES):
        store(load(x + 4 * i, FLOAT32), place + 2 * i, BFLOAT16)


MOVE = record_of(
    "keys",  # of the whole pool
    "values",
    "sources",  # [count] int32 slots
    "places",  # [count] int32 slots
    "count",
    "layers",
    "blocks",
    "kv_heads",
    "dims",
    "width",
    "vnni",
)


@kernel(MOVE)
def move_kernel(address: Any) -> None:
    """Copy keys and values from slots to other slots, in order."""
    work = carray(address, 1)[0]
    for layer in range(thread_id(), work.layers, num_threads()):
        for i in range(work.count):
            source, place = int_at(work.sources + 4 * i), int_at(work.places + 4 * i)
            for head in range(work.kv_heads):
                block = layer * work.blocks
                old = ((block + source // LANES) * work.kv_heads + head) * work.dims * LANES
                new = ((block + place // LANES) * work.kv_heads + head) * work.dims * LANES
                for i in range(work.dims):
                    before = old + _key_place(i, source % LANES, work.vnni)
                    after = new + _key_place(i, place % LANES, work.vnni)
                    _copy(work.keys + before * work.width, work.keys + after * work.width, work.width)
                    before = old + _value_place(i, source % LANES, work.vnni, work.dims)
                    after = new + _value_place(i, place % LANES, work.vnni, work.dims)
                    _copy(work.values + before * work.width, work.values + after * work.width, work.width)


STORE = record_of(
    "query",  # [rows, kv_heads * q_per_kv, head_dim]
    "key",  # [rows, kv_heads, head_dim]
    "value",  # [rows, kv_heads, head_dim]
    "slots",  # as in ENTER, from here on
    "queries",
    "keys",
    "values",
    "scratch",
    "rows",
    "kv_heads",
    "q_per_kv",
    "head_dim",
    "dims",
    "width",
    "vnni",
)


@kernel(STORE)
def store_kernel(address: Any) -> None:
    """Write a stock model's keys and values to the pool, and lay out its queries."""
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.q_per_kv * work.kv_heads
    key = work.scratch + thread_id() * work.dims * 4
    for row in range(thread_id(), work.rows, num_threads()):
        for head in range(heads):
            group = head % work.q_per_kv
            place = ((head // work.q_per_kv * work.rows + row) * work.q_per_kv + group) * work.dims
            for i in range(work.head_dim):
                x = number_at(work.query + (row * heads + head) * size + i * work.width, work.width)
                if work.vnni == 0:
                    put_float(work.queries + 4 * (place + i), x)
                else:
                    put_half(work.queries + 2 * (place + i), x)
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        for head in range(work.kv_heads):
            at = (block * work.kv_heads + head) * work.dims * LANES * work.width
            from_ = (row * work.kv_heads + head) * size
            for i in range(work.head_dim):
                put_float(key + 4 * i, number_at(work.key + from_ + i * work.width, work.width))
            put_key(work, key, work.keys + at, lane)
            put_value(work, work.value + from_, work.values + at, lane)
