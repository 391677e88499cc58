"""What stands between a decoder layer's products: kernels that each do the work of some ten operations.

Rows are independent: a row's result is the same bits beside any others. Numbers are added up in float32 and rounded
once, when they are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from engine.model.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    divide,
    exp,
    float_at,
    fma,
    half_at,
    int_at,
    load,
    multiply,
    put_float,
    put_half,
    splat,
    store,
    total,
)
from engine.model.team import kernel, member, members


def _record(*names: str, floats: tuple[str, ...] = ()) -> np.dtype[Any]:
    return np.dtype([(name, "i8") for name in names] + [(name, "f4") for name in floats])


NORM = _record(
    "residual",  # [rows, hidden] float32, to which delta is added
    "delta",  # [rows, hidden], or 0
    "weight",  # [hidden] float32
    "out",  # [count, hidden]: the norm of the sum
    "chosen",  # [count] int32: the rows to do, or 0 for the first `count`
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
                x = add(x, _numbers(delta + at * work.width, work.width))
                store(x, residual + 4 * at, FLOAT32)
            squares = fma(x, x, squares)
        mean = total(squares) / np.float32(work.hidden)
        scale = splat(np.float32(1) / np.sqrt(mean + work.epsilon))
        out = work.out + i * work.hidden * work.width
        for at in range(0, work.hidden, LANES):
            x = multiply(multiply(load(residual + 4 * at, FLOAT32), scale), load(work.weight + 4 * at, FLOAT32))
            _put_numbers(x, out + at * work.width, work.width)


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
            x = _numbers(gate + at, work.width)
            swish = divide(x, add(one, exp(multiply(x, splat(np.float32(-1))))))
            _put_numbers(multiply(swish, _numbers(up + at, work.width)), out + at, work.width)


ENTER = _record(
    "qkv",  # [rows, (groups + 2) * kv_heads * head_dim]: queries, keys, values
    "positions",  # [rows] int32
    "slots",  # [rows] int32: where in the pool the row's key and value go
    "turns",  # [positions, rotated] float32: cosines of the first half of the rotated dimensions, then sines
    "query_norm",  # [head_dim] float32, or 0
    "key_norm",  # [head_dim] float32, or 0
    "queries",  # out: [kv_heads, rows, groups, dims] float32
    "keys",  # out: [blocks, kv_heads, dims, 16]
    "values",  # out: [blocks, kv_heads, 16, dims]
    "scratch",  # [threads, dims] float32
    "rows",
    "kv_heads",
    "groups",
    "head_dim",
    "dims",
    "rotated",
    "width",
    floats=("epsilon",),
)


@kernel(ENTER)
def enter_kernel(address: Any) -> None:
    """Normalise and turn queries and keys, and enter keys and values into the pool."""
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.groups * work.kv_heads
    for row in range(member(), work.rows, members()):
        x = work.qkv + row * (heads + 2 * work.kv_heads) * size
        for head in range(heads):
            group = head % work.groups
            place = ((head // work.groups * work.rows + row) * work.groups + group) * work.dims * 4
            _turned(work, row, x + head * size, work.query_norm, work.queries + place)
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        key = work.scratch + member() * work.dims * 4
        for head in range(work.kv_heads):
            _turned(work, row, x + (heads + head) * size, work.key_norm, key)
            at = (block * work.kv_heads + head) * work.dims * LANES * work.width
            _put_key(work, key, work.keys + at + lane * work.width)
            value = x + (heads + work.kv_heads + head) * size
            _put_value(work, value, work.values + at + lane * work.dims * work.width)


@njit
def _turned(work: Any, row: int, x: int, weight: int, out: int) -> None:
    """One head's query or key, normalised if there is a weight, turned by its position: [dims] float32."""
    squares = np.float32(0)
    for i in range(work.head_dim):
        value = _number(x + i * work.width, work.width)
        squares += value * value
        put_float(out + 4 * i, value)
    if weight != 0:
        scale = np.float32(1) / np.sqrt(squares / np.float32(work.head_dim) + work.epsilon)
        for i in range(work.head_dim):
            put_float(out + 4 * i, float_at(out + 4 * i) * scale * float_at(weight + 4 * i))
    half = work.rotated // 2
    cosines = work.turns + int_at(work.positions + 4 * row) * work.rotated * 4
    sines = cosines + 4 * half
    for i in range(half):
        a, b = float_at(out + 4 * i), float_at(out + 4 * (i + half))
        cosine, sine = float_at(cosines + 4 * i), float_at(sines + 4 * i)
        put_float(out + 4 * i, a * cosine - b * sine)
        put_float(out + 4 * (i + half), b * cosine + a * sine)


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
)


@kernel(STORE)
def store_kernel(address: Any) -> None:
    """Enter keys and values that a stock model has made into the pool, and lay out its queries."""
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.groups * work.kv_heads
    key = work.scratch + member() * work.dims * 4
    for row in range(member(), work.rows, members()):
        for head in range(heads):
            group = head % work.groups
            place = ((head // work.groups * work.rows + row) * work.groups + group) * work.dims * 4
            for i in range(work.head_dim):
                x = _number(work.query + (row * heads + head) * size + i * work.width, work.width)
                put_float(work.queries + place + 4 * i, x)
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        for head in range(work.kv_heads):
            at = (block * work.kv_heads + head) * work.dims * LANES * work.width
            from_ = (row * work.kv_heads + head) * size
            for i in range(work.head_dim):
                put_float(key + 4 * i, _number(work.key + from_ + i * work.width, work.width))
            _put_key(work, key, work.keys + at + lane * work.width)
            _put_value(work, work.value + from_, work.values + at + lane * work.dims * work.width)


@njit
def _put_key(work: Any, key: int, place: int) -> None:
    """One head's key, [dims] float32, to its lane of a block: a number every 16."""
    if work.width == BFLOAT16:
        for i in range(work.head_dim):
            put_half(place + i * LANES * 2, float_at(key + 4 * i))
    else:
        for i in range(work.head_dim):
            put_float(place + i * LANES * 4, float_at(key + 4 * i))


@njit
def _put_value(work: Any, value: int, place: int) -> None:
    if work.width == BFLOAT16:
        for i in range(work.head_dim):
            put_half(place + i * 2, half_at(value + i * 2))
    else:
        for i in range(work.head_dim):
            put_float(place + i * 4, float_at(value + i * 4))


MOVE = _record(
    "keys",  # [layers, blocks, kv_heads, dims, 16]
    "values",  # [layers, blocks, kv_heads, 16, dims]
    "sources",  # [count] int32 slots
    "places",  # [count] int32 slots
    "count",
    "layers",
    "blocks",
    "kv_heads",
    "dims",
    "width",
)


@kernel(MOVE)
def move_kernel(address: Any) -> None:
    """Copy keys and values from slots to others, one after the other."""
    work = carray(address, 1)[0]
    for layer in range(member(), work.layers, members()):
        for i in range(work.count):
            source, place = int_at(work.sources + 4 * i), int_at(work.places + 4 * i)
            for head in range(work.kv_heads):
                block = layer * work.blocks
                old = ((block + source // LANES) * work.kv_heads + head) * work.dims * LANES
                new = ((block + place // LANES) * work.kv_heads + head) * work.dims * LANES
                _copy(work.keys, old + source % LANES, new + place % LANES, LANES, work.dims, work.width)
                old, new = old + source % LANES * work.dims, new + place % LANES * work.dims
                _copy(work.values, old, new, 1, work.dims, work.width)


@njit
def _copy(base: int, old: int, new: int, stride: int, count: int, width: int) -> None:
    """`count` numbers, each `stride` numbers after the one before."""
    if width == BFLOAT16:
        for i in range(count):
            put_half(base + (new + i * stride) * 2, half_at(base + (old + i * stride) * 2))
    else:
        for i in range(count):
            put_float(base + (new + i * stride) * 4, float_at(base + (old + i * stride) * 4))


@njit
def _number(address: int, width: int) -> Any:
    return half_at(address) if width == BFLOAT16 else float_at(address)


@njit
def _numbers(address: int, width: int) -> Any:
    """16 numbers, as float32."""
    if width == BFLOAT16:
        return load(address, BFLOAT16)
    return load(address, FLOAT32)


@njit
def _put_numbers(x: Any, address: int, width: int) -> None:
    if width == BFLOAT16:
        store(x, address, BFLOAT16)
    else:
        store(x, address, FLOAT32)
