"""Entering queries, keys and values: they are normalised and rotated, and keys and values are written to the pool.

Rows are independent: a row's result is the same bits whatever the other rows. Numbers are summed in float32 and rounded
once, when they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from engine.kernels.attention.kv_slots import put_halves, put_key, put_value
from engine.kernels.records import record_of
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    float_at,
    fma,
    int_at,
    load,
    multiply,
    number_at,
    numbers_at,
    put_float,
    put_number,
    splat,
    store,
    total,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

ENTER = record_of(
    # of a batch
    "positions",  # [rows] int32
    "slots",  # [rows] int32: where in the pool the row's key and value go
    "queries",  # out: [kv_heads, rows, q_per_kv, dims] float32; bfloat16 if vnni
    "scratch",  # [threads, dims] float32
    "rows",
    # of a layer
    "cos_sin",  # [positions, rotated] float32: cosines of the first half of the rotated dimensions, then sines
    "qkv",  # rows of [(q_per_kv + 2) * kv_heads * head_dim]: queries, keys, values
    "stride",  # bytes from row to row
    "query_norm",  # [head_dim] float32, or 0
    "key_norm",  # [head_dim] float32, or 0
    "value_norm",  # [head_dim] float32, or 0
    "norms_last",  # 1: queries and keys are normalised after they are rotated
    "values_are_keys",  # 1: rows end after the keys, which are the values too, before norm and rotation
    "keys",  # out: one layer's part of the pool; 0: the layer reads another's, and rows are queries alone
    "values",
    "kv_heads",
    "q_per_kv",
    "head_dim",
    "dims",
    "rotated",  # dimensions of each head, from the first on; 0: none
    "width",
    "vnni",  # 1: the pool keeps bfloat16 in pairs (`engine.model.kv_pool`)
    floats=("epsilon",),
)


@kernel(ENTER)
def enter_kernel(address: Any) -> None:
    """Normalise and rotate queries and keys, and write keys and values to the pool.

    A thread has neighbouring rows of one head: sixteen keys of a head are interleaved in a block's cache lines, and two
    cores that write to the same lines wait for each other.
    """
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.q_per_kv * work.kv_heads
    units, room = work.kv_heads * work.rows, work.scratch + thread_id() * work.dims * 4
    for unit in range(units * thread_id() // num_threads(), units * (thread_id() + 1) // num_threads()):
        kv_head, row = unit // work.rows, unit % work.rows
        x = work.qkv + row * work.stride
        pad(work, room)
        put_queries(work, unit, row, x + kv_head * work.q_per_kv * size, room)
        if work.keys == 0:
            continue
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        at = (block * work.kv_heads + kv_head) * work.dims * LANES * work.width
        rotated(work, row, x + (heads + kv_head) * size, work.key_norm, room)
        put_key(work, room, work.keys + at, lane)
        value = value_of(work, x, kv_head)
        if work.value_norm != 0:
            normalised(work, value, work.value_norm, room)
            for i in range(work.head_dim):
                put_number(room + i * work.width, float_at(room + 4 * i), work.width)
            value = room
        put_value(work, value, work.values + at, lane)


@subroutine
def pad(work: Any, x: int) -> None:
    """Put zeros after the first head_dim of [dims] float32, where layers with larger heads may have written."""
    for i in range(work.head_dim, work.dims):
        put_float(x + 4 * i, np.float32(0))


@subroutine
def value_of(work: Any, x: int, kv_head: int) -> Any:
    """Return the address of a head's value in a row of `qkv`."""
    heads = (work.q_per_kv + (0 if work.values_are_keys != 0 else 1)) * work.kv_heads
    return x + (heads + kv_head) * work.head_dim * work.width


@subroutine
def put_queries(work: Any, unit: int, row: int, x: int, room: int) -> None:
    """Lay out the queries of the heads that share keys: a unit's, of which the first is at x."""
    for group in range(work.q_per_kv):
        query, place = x + group * work.head_dim * work.width, (unit * work.q_per_kv + group) * work.dims
        if work.vnni == 0:
            rotated(work, row, query, work.query_norm, work.queries + 4 * place)
        else:
            rotated(work, row, query, work.query_norm, room)
            put_halves(room, work.dims, work.queries + 2 * place)


@subroutine
def rotated(work: Any, row: int, x: int, weight: int, out: int) -> None:
    """Write one head's query or key, normalised if there is a weight, rotated by its position: [dims] float32."""
    normalised(work, x, weight if work.norms_last == 0 else 0, out)
    _rotate(work, row, out)
    if work.norms_last != 0:
        _normalise(work, weight, out)


@subroutine
def normalised(work: Any, x: int, weight: int, out: int) -> None:
    """Write one head's numbers, normalised if there is a weight: [dims] float32."""
    whole = work.head_dim // LANES * LANES
    for i in range(0, whole, LANES):
        store(numbers_at(x + i * work.width, work.width), out + 4 * i, FLOAT32)
    for i in range(whole, work.head_dim):
        put_float(out + 4 * i, number_at(x + i * work.width, work.width))
    if weight != 0:
        _normalise(work, weight, out)


@subroutine
def _normalise(work: Any, weight: int, out: int) -> None:
    """Normalise one head's [dims] float32 in place."""
    whole, lanes = work.head_dim // LANES * LANES, splat(np.float32(0))
    for i in range(0, whole, LANES):
        numbers = load(out + 4 * i, FLOAT32)
        lanes = fma(numbers, numbers, lanes)
    squares = total(lanes)
    for i in range(whole, work.head_dim):
        squares += float_at(out + 4 * i) * float_at(out + 4 * i)
    scale = np.float32(1) / np.sqrt(squares / np.float32(work.head_dim) + work.epsilon)
    for i in range(0, whole, LANES):
        scaled = multiply(load(out + 4 * i, FLOAT32), splat(scale))
        store(multiply(scaled, load(weight + 4 * i, FLOAT32)), out + 4 * i, FLOAT32)
    for i in range(whole, work.head_dim):
        put_float(out + 4 * i, float_at(out + 4 * i) * scale * float_at(weight + 4 * i))


@subroutine
def _rotate(work: Any, row: int, out: int) -> None:
    half = work.rotated // 2
    whole, second = half // LANES * LANES, out + 4 * half
    cosines = work.cos_sin + int_at(work.positions + 4 * row) * work.rotated * 4
    sines = cosines + 4 * half
    for i in range(0, 4 * whole, 4 * LANES):
        a, b = load(out + i, FLOAT32), load(second + i, FLOAT32)
        cosine, sine = load(cosines + i, FLOAT32), load(sines + i, FLOAT32)
        store(fma(a, cosine, multiply(multiply(b, sine), splat(np.float32(-1)))), out + i, FLOAT32)
        store(fma(b, cosine, multiply(a, sine)), second + i, FLOAT32)
    for i in range(4 * whole, 4 * half, 4):
        a, b = float_at(out + i), float_at(second + i)
        cosine, sine = float_at(cosines + i), float_at(sines + i)
        put_float(out + i, a * cosine - b * sine)
        put_float(second + i, b * cosine + a * sine)
