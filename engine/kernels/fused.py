"""The fused kernels between a decoder layer's products, each doing the work of some ten operations.

Rows are independent: a row's result is the same bits whatever the other rows. Numbers are summed in float32 and rounded
once, when they are stored.
"""

from __future__ import annotations

from enum import IntEnum
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
    maximum,
    minimum,
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
from engine.kernels.threads import kernel, num_threads, thread_id


def record_of(*names: str, floats: tuple[str, ...] = ()) -> np.dtype[Any]:
    """A kernel's record: 64-bit addresses, sizes and flags, then float32 numbers."""
    return np.dtype([(name, "i8") for name in names] + [(name, "f4") for name in floats])


NORM = record_of(
    "residual",  # [rows, hidden] float32, to which delta is added
    "delta",  # [rows, hidden], or 0
    "delta_weight",  # [hidden] float32: the norm of delta is added; or 0
    "weight",  # [hidden] float32, or 0: no norm, out = residual
    "centred",  # 1: the mean is subtracted first
    "bias",  # [hidden] float32, added last, or 0
    "out",  # [count, hidden]: the norm of the sum
    "chosen",  # [count] int32: the rows to compute, or 0 for the first `count`
    "kept",  # [rows, hidden], rows `stride` bytes apart: a copy of the sum, or 0
    "stride",
    "count",
    "hidden",
    "width",
    floats=("epsilon", "delta_scale", "scale"),
)


@kernel(NORM)
def norm_kernel(address: Any) -> None:
    """residual = scale * (residual + delta_scale * delta), or norm(delta, delta_weight) in place of that delta;
    out = norm(residual, weight), where norm(x, w) = x / sqrt(mean(x^2) + epsilon) * w, of x less its mean if centred,
    and the bias is added.
    """
    work = carray(address, 1)[0]
    for i in range(thread_id(), work.count, num_threads()):
        row = i if work.chosen == 0 else int_at(work.chosen + 4 * i)
        residual, delta = work.residual + row * work.hidden * 4, work.delta + row * work.hidden * work.width
        if work.delta_weight != 0:
            _add_norm(work, residual, delta)
        squares, sums = splat(np.float32(0)), splat(np.float32(0))
        for at in range(0, work.hidden, LANES):
            x = load(residual + 4 * at, FLOAT32)
            if work.delta != 0 and work.delta_weight == 0:
                x = fma(numbers_at(delta + at * work.width, work.width), splat(work.delta_scale), x)
                x = multiply(x, splat(work.scale))
                store(x, residual + 4 * at, FLOAT32)
            squares, sums = fma(x, x, squares), add(sums, x)
        below = splat(np.float32(0))  # minus the mean
        if work.centred != 0:
            below, squares = splat(-total(sums) / np.float32(work.hidden)), splat(np.float32(0))
            for at in range(0, work.hidden, LANES):
                x = add(load(residual + 4 * at, FLOAT32), below)
                squares = fma(x, x, squares)
        # without a norm there is no epsilon either, and a row of zeros (a padding token's) would be divided by 0
        scale = splat(_norm_scale(work, squares) if work.weight != 0 else np.float32(1))
        out = work.out + i * work.hidden * work.width
        for at in range(0, work.hidden, LANES):
            x = load(residual + 4 * at, FLOAT32)
            if work.kept != 0:
                put_numbers(x, work.kept + row * work.stride + at * work.width, work.width)
            if work.centred != 0:
                x = add(x, below)
            if work.weight != 0:
                x = multiply(multiply(x, scale), load(work.weight + 4 * at, FLOAT32))
            if work.bias != 0:
                x = add(x, load(work.bias + 4 * at, FLOAT32))
            put_numbers(x, out + at * work.width, work.width)


@njit
def _norm_scale(work: Any, squares: Any) -> Any:
    return np.float32(1) / np.sqrt(total(squares) / np.float32(work.hidden) + work.epsilon)


@njit
def _add_norm(work: Any, residual: int, delta: int) -> None:
    squares = splat(np.float32(0))
    for at in range(0, work.hidden, LANES):
        x = numbers_at(delta + at * work.width, work.width)
        squares = fma(x, x, squares)
    scale = splat(_norm_scale(work, squares))
    for at in range(0, work.hidden, LANES):
        x = multiply(numbers_at(delta + at * work.width, work.width), scale)
        x = fma(x, load(work.delta_weight + 4 * at, FLOAT32), load(residual + 4 * at, FLOAT32))
        store(multiply(x, splat(work.scale)), residual + 4 * at, FLOAT32)


class Activation(IntEnum):
    """What a gate applies to `alpha` times its numbers. GELU: the approximation by tanh. SQUARED_RELU: max(x, 0)^2.
    CLAMPED: SiLU over `alpha`, of gates and ups that are cut at `limit`, with 1 added to the ups.
    """

    SILU = 0
    GELU = 1
    CLAMPED = 2
    SQUARED_RELU = 3


GATE = record_of(
    "gate",  # [rows, inner], rows `gate_stride` bytes apart
    "gate_stride",
    "up",  # [rows, inner], rows `up_stride` bytes apart; 0: ones
    "up_stride",
    "out",  # [rows, inner]
    "rows",
    "inner",
    "width",
    "activation",
    floats=("alpha", "limit"),
)

_GELU = np.float32(2 * (2 / np.pi) ** 0.5), np.float32(2 * (2 / np.pi) ** 0.5 * 0.044715)


@kernel(GATE)
def gate_kernel(address: Any) -> None:
    """out = act(gate) * up, where act(x) = x / (1 + exp(-y)): y is x for SiLU, _GELU[0] * x + _GELU[1] * x^3 for GELU,
    since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 * u)).
    """
    work = carray(address, 1)[0]
    one = splat(np.float32(1))
    for row in range(thread_id(), work.rows, num_threads()):
        gate, up = work.gate + row * work.gate_stride, work.up + row * work.up_stride
        out = work.out + row * work.inner * work.width
        for at in range(0, work.inner * work.width, LANES * work.width):
            x, factor = numbers_at(gate + at, work.width), one
            if work.up != 0:
                factor = numbers_at(up + at, work.width)
            if work.activation == Activation.CLAMPED:
                limit, lowest = splat(work.limit), splat(-work.limit)
                x, factor = minimum(x, limit), add(maximum(lowest, minimum(factor, limit)), one)
            else:
                x = multiply(x, splat(work.alpha))
            y = multiply(x, splat(-work.alpha if work.activation == Activation.CLAMPED else np.float32(-1)))
            if work.activation == Activation.GELU:
                y = multiply(y, fma(multiply(x, x), splat(_GELU[1]), splat(_GELU[0])))
            x = divide(x, add(one, exp(y))) if work.activation != Activation.SQUARED_RELU else _squared_relu(x)
            put_numbers(multiply(x, factor), out + at, work.width)


@njit
def _squared_relu(x: Any) -> Any:
    x = maximum(splat(np.float32(0)), x)
    return multiply(x, x)


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
        _put_key(work, room, work.keys + at, lane)
        value = value_of(work, x, kv_head)
        if work.value_norm != 0:
            normalised(work, value, work.value_norm, room)
            for i in range(work.head_dim):
                put_number(room + i * work.width, float_at(room + 4 * i), work.width)
            value = room
        _put_value(work, value, work.values + at, lane)


@njit
def pad(work: Any, x: int) -> None:
    """Put zeros after the first head_dim of [dims] float32, where layers with larger heads may have written."""
    for i in range(work.head_dim, work.dims):
        put_float(x + 4 * i, np.float32(0))


@njit
def value_of(work: Any, x: int, kv_head: int) -> Any:
    """The address of a head's value in a row of `qkv`."""
    heads = (work.q_per_kv + (0 if work.values_are_keys != 0 else 1)) * work.kv_heads
    return x + (heads + kv_head) * work.head_dim * work.width


@njit
def put_queries(work: Any, unit: int, row: int, x: int, room: int) -> None:
    """Lay out the queries of the heads that share keys: a unit's, of which the first is at x."""
    for group in range(work.q_per_kv):
        query, place = x + group * work.head_dim * work.width, (unit * work.q_per_kv + group) * work.dims
        if work.vnni == 0:
            rotated(work, row, query, work.query_norm, work.queries + 4 * place)
        else:
            rotated(work, row, query, work.query_norm, room)
            _put_halves(room, work.dims, work.queries + 2 * place)


@njit
def rotated(work: Any, row: int, x: int, weight: int, out: int) -> None:
    """One head's query or key, normalised if there is a weight, rotated by its position: [dims] float32."""
    normalised(work, x, weight if work.norms_last == 0 else 0, out)
    _rotate(work, row, out)
    if work.norms_last != 0:
        _normalise(work, weight, out)


@njit
def normalised(work: Any, x: int, weight: int, out: int) -> None:
    """One head's numbers, normalised if there is a weight: [dims] float32."""
    whole = work.head_dim // LANES * LANES
    for i in range(0, whole, LANES):
        store(numbers_at(x + i * work.width, work.width), out + 4 * i, FLOAT32)
    for i in range(whole, work.head_dim):
        put_float(out + 4 * i, number_at(x + i * work.width, work.width))
    if weight != 0:
        _normalise(work, weight, out)


@njit
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


@njit
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
            _put_key(work, key, work.keys + at, lane)
            _put_value(work, work.value + from_, work.values + at, lane)


@njit
def _key_place(i: int, lane: int, vnni: int) -> Any:
    """The index of a key's dimension i within a block's keys."""
    return i // 2 * 2 * LANES + lane * 2 + i % 2 if vnni != 0 else i * LANES + lane


@njit
def _value_place(i: int, lane: int, vnni: int, dims: int) -> Any:
    """The index of a value's dimension i within a block's values."""
    if vnni != 0:
        return i // LANES * LANES * LANES + lane // 2 * 2 * LANES + i % LANES * 2 + lane % 2
    return lane * dims + i


@njit
def _put_key(work: Any, key: int, block: int, lane: int) -> None:
    """Write one head's key, [dims] float32, to its lane of a block. The source is overwritten."""
    if work.vnni != 0:
        _put_halves(key, work.dims, key)
        for i in range(0, work.dims, 2):  # a pair is four bytes
            put_float(block + _key_place(i, lane, 1) * 2, float_at(key + 2 * i))
    else:
        for i in range(work.head_dim):
            put_number(block + _key_place(i, lane, 0) * work.width, float_at(key + 4 * i), work.width)


@njit
def _put_value(work: Any, value: int, block: int, lane: int) -> None:
    for i in range(work.head_dim):
        place = _value_place(i, lane, work.vnni, work.dims)
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
