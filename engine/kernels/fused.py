"""The fused kernels between a decoder layer's products, each doing the work of some ten operations.

Rows are independent: a row's result is the same bits whatever the other rows. Numbers are summed in float32 and rounded
once, when they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from engine.kernels.exponential import exp
from engine.kernels.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    copy_half,
    divide,
    float_at,
    fma,
    int_at,
    load,
    multiply,
    number_at,
    numbers_at,
    put_float,
    put_half,
    put_number,
    put_numbers,
    splat,
    store,
    total,
)
from engine.kernels.threads import kernel, member, members


def _record(*names: str, floats: tuple[str, ...] = ()) -> np.dtype[Any]:
    return np.dtype([(name, "i8") for name in names] + [(name, "f4") for name in floats])


NORM = _record(
    "residual",  # [rows, hidden] float32, to which delta is added
    "delta",  # [rows, hidden], or 0
    "weight",  # [hidden] float32
    "out",  # [count, hidden]: the norm of the sum
    "chosen",  # [count] int32: the rows to compute, or 0 for the first `count`
    "kept",  # [rows, hidden], rows `stride` bytes apart: a copy of the sum, or 0
    "stride",
    "count",
    "hidden",
    "width",
    floats=("epsilon",),
)


@kernel(NORM)
def norm_kernel(address: Any) -> None:
    """residual += delta; out = residual / sqrt(mean(residual^2) + epsilon) * weight."""
    work = carray(address, 1)[0]
    for i in range(member(), work.count, members()):
        row = i if work.chosen == 0 else int_at(work.chosen + 4 * i)
        residual, delta = work.residual + row * work.hidden * 4, work.delta + row * work.hidden * work.width
        squares = splat(np.float32(0))
        for at in range(0, work.hidden, LANES):
            x = load(residual + 4 * at, FLOAT32)
            if work.delta != 0:
                x = add(x, numbers_at(delta + at * work.width, work.width))
                store(x, residual + 4 * at, FLOAT32)
            squares = fma(x, x, squares)
        mean = total(squares) / np.float32(work.hidden)
        scale = splat(np.float32(1) / np.sqrt(mean + work.epsilon))
        out = work.out + i * work.hidden * work.width
        for at in range(0, work.hidden, LANES):
            x = load(residual + 4 * at, FLOAT32)
            if work.kept != 0:
                put_numbers(x, work.kept + row * work.stride + at * work.width, work.width)
            x = multiply(multiply(x, scale), load(work.weight + 4 * at, FLOAT32))
            put_numbers(x, out + at * work.width, work.width)


GATE = _record(
    "gate_up",  # [rows, 2 * inner]
    "out",  # [rows, inner]
    "rows",
    "inner",
    "width",
)


@kernel(GATE)
def gate_kernel(address: Any) -> None:
    """out = silu(gate) * up."""
    work = carray(address, 1)[0]
    one = splat(np.float32(1))
    for row in range(member(), work.rows, members()):
        gate = work.gate_up + row * 2 * work.inner * work.width
        up, out = gate + work.inner * work.width, work.out + row * work.inner * work.width
        for at in range(0, work.inner * work.width, LANES * work.width):
            x = numbers_at(gate + at, work.width)
            swish = divide(x, add(one, exp(multiply(x, splat(np.float32(-1))))))
            put_numbers(multiply(swish, numbers_at(up + at, work.width)), out + at, work.width)


ENTER = _record(
    # of a batch
    "positions",  # [rows] int32
    "slots",  # [rows] int32: where in the pool the row's key and value go
    "turns",  # [positions, rotated] float32: cosines of the first half of the rotated dimensions, then sines
    "queries",  # out: [kv_heads, rows, groups, dims] float32, paired bfloat16
    "scratch",  # [threads, dims] float32
    "rows",
    # of a layer
    "qkv",  # [rows, (groups + 2) * kv_heads * head_dim]: queries, keys, values
    "query_norm",  # [head_dim] float32, or 0
    "key_norm",  # [head_dim] float32, or 0
    "keys",  # out: one layer's part of the pool
    "values",
    "kv_heads",
    "groups",
    "head_dim",
    "dims",
    "rotated",
    "width",
    "paired",  # 1: the pool's layout is paired (`engine.model.kv_pool`)
    floats=("epsilon",),
)


@kernel(ENTER)
def enter_kernel(address: Any) -> None:
    """Normalise and rotate queries and keys, and write keys and values to the pool.

    A thread has neighbouring rows of one head: sixteen keys of a head are interleaved in a block's cache lines, and two
    cores that write to the same lines wait for each other.
    """
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.groups * work.kv_heads
    units, room = work.kv_heads * work.rows, work.scratch + member() * work.dims * 4
    for unit in range(units * member() // members(), units * (member() + 1) // members()):
        kv_head, row = unit // work.rows, unit % work.rows
        x = work.qkv + row * (heads + 2 * work.kv_heads) * size
        for group in range(work.groups):
            query, place = x + (kv_head * work.groups + group) * size, (unit * work.groups + group) * work.dims
            if work.paired == 0:
                _turned(work, row, query, work.query_norm, work.queries + 4 * place)
            else:
                _turned(work, row, query, work.query_norm, room)
                _put_halves(room, work.dims, work.queries + 2 * place)
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        at = (block * work.kv_heads + kv_head) * work.dims * LANES * work.width
        _turned(work, row, x + (heads + kv_head) * size, work.key_norm, room)
        _put_key(work, room, work.keys + at, lane)
        _put_value(work, x + (heads + work.kv_heads + kv_head) * size, work.values + at, lane)


@njit
def _turned(work: Any, row: int, x: int, weight: int, out: int) -> None:
    """One head's query or key, normalised if there is a weight, rotated by its position: [dims] float32."""
    whole, lanes = work.head_dim // LANES * LANES, splat(np.float32(0))
    for i in range(0, whole, LANES):
        numbers = numbers_at(x + i * work.width, work.width)
        lanes = fma(numbers, numbers, lanes)
        store(numbers, out + 4 * i, FLOAT32)
    squares = total(lanes)
    for i in range(whole, work.head_dim):
        value = number_at(x + i * work.width, work.width)
        squares += value * value
        put_float(out + 4 * i, value)
    if weight != 0:
        scale = np.float32(1) / np.sqrt(squares / np.float32(work.head_dim) + work.epsilon)
        for i in range(0, whole, LANES):
            scaled = multiply(load(out + 4 * i, FLOAT32), splat(scale))
            store(multiply(scaled, load(weight + 4 * i, FLOAT32)), out + 4 * i, FLOAT32)
        for i in range(whole, work.head_dim):
            put_float(out + 4 * i, float_at(out + 4 * i) * scale * float_at(weight + 4 * i))
    _turn(work, row, out)


@njit
def _turn(work: Any, row: int, out: int) -> None:
    half = work.rotated // 2
    whole, second = half // LANES * LANES, out + 4 * half
    cosines = work.turns + int_at(work.positions + 4 * row) * work.rotated * 4
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


STORE = _record(
    "query",  # [rows, kv_heads * groups, head_dim]
    "key",  # [rows, kv_heads, head_dim]
    "value",  # [rows, kv_heads, head_dim]
    "slots",  # as in ENTER, from here on
    "queries",
    "keys",
    "values",
    "scratch",
    "rows",
    "kv_heads",
    "groups",
    "head_dim",
    "dims",
    "width",
    "paired",
)


@kernel(STORE)
def store_kernel(address: Any) -> None:
    """Write a stock model's keys and values to the pool, and lay out its queries."""
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.groups * work.kv_heads
    key = work.scratch + member() * work.dims * 4
    for row in range(member(), work.rows, members()):
        for head in range(heads):
            group = head % work.groups
            place = ((head // work.groups * work.rows + row) * work.groups + group) * work.dims
            for i in range(work.head_dim):
                x = number_at(work.query + (row * heads + head) * size + i * work.width, work.width)
                if work.paired == 0:
                    put_float(work.queries + 4 * (place + i), x)
                else:
                    put_half(work.queries + 2 * (place + i), x)
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        for head in range(work.kv_heads):
            at = (block * work.kv_heads + head) * work.dims * LANES * work.width
            from_ = (row * work.kv_heads + head) * size
            for i in range(work.head_dim):
                put_float(key + 4 * i, number_at(work.key + from_ + i * work.width, work.width))
            _put_key(work, key, work.keys + at, lane)
            _put_value(work, work.value + from_, work.values + at, lane)


@njit
def _key_place(i: int, lane: int, paired: int) -> Any:
    """The index of a key's dimension i within a block's keys."""
    return i // 2 * 2 * LANES + lane * 2 + i % 2 if paired != 0 else i * LANES + lane


@njit
def _value_place(i: int, lane: int, paired: int, dims: int) -> Any:
    """The index of a value's dimension i within a block's values."""
    if paired != 0:
        return i // LANES * LANES * LANES + lane // 2 * 2 * LANES + i % LANES * 2 + lane % 2
    return lane * dims + i


@njit
def _put_key(work: Any, key: int, block: int, lane: int) -> None:
    """Write one head's key, [dims] float32, to its lane of a block. The source is overwritten."""
    if work.paired != 0:
        _put_halves(key, work.dims, key)
        for i in range(0, work.dims, 2):  # a pair is four bytes
            put_float(block + _key_place(i, lane, 1) * 2, float_at(key + 2 * i))
    else:
        for i in range(work.head_dim):
            put_number(block + _key_place(i, lane, 0) * work.width, float_at(key + 4 * i), work.width)


@njit
def _put_value(work: Any, value: int, block: int, lane: int) -> None:
    for i in range(work.head_dim):
        place = _value_place(i, lane, work.paired, work.dims)
        _copy(value + i * work.width, block + place * work.width, work.width)


@njit
def _copy(source: int, place: int, width: int) -> None:
    """Copy one number."""
    if width == BFLOAT16:
        copy_half(source, place)
    else:
        put_float(place, float_at(source))


@njit
def _put_halves(x: int, count: int, place: int) -> None:
    """Convert `count` float32 numbers, a multiple of 16, to bfloat16, possibly in place."""
    for i in range(0, count, LANES):
        store(load(x + 4 * i, FLOAT32), place + 2 * i, BFLOAT16)


MOVE = _record(
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
    "paired",
)


@kernel(MOVE)
def move_kernel(address: Any) -> None:
    """Copy keys and values from slots to other slots, in order."""
    work = carray(address, 1)[0]
    for layer in range(member(), work.layers, members()):
        for i in range(work.count):
            source, place = int_at(work.sources + 4 * i), int_at(work.places + 4 * i)
            for head in range(work.kv_heads):
                block = layer * work.blocks
                old = ((block + source // LANES) * work.kv_heads + head) * work.dims * LANES
                new = ((block + place // LANES) * work.kv_heads + head) * work.dims * LANES
                for i in range(work.dims):
                    before = old + _key_place(i, source % LANES, work.paired)
                    after = new + _key_place(i, place % LANES, work.paired)
                    _copy(work.keys + before * work.width, work.keys + after * work.width, work.width)
                    before = old + _value_place(i, source % LANES, work.paired, work.dims)
                    after = new + _value_place(i, place % LANES, work.paired, work.dims)
                    _copy(work.values + before * work.width, work.values + after * work.width, work.width)
