"""The kernels of gated delta nets: see `engine.kernels.state.delta`.

S lies in tiles of 16 of its columns, which do not depend on each other: a tile of 8 KB stays in the first level of
cache while one thread takes all rows of a request through it. A commit replays a row from its inputs, before the
convolution, and its gates: with the same operations, so to the bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from engine.kernels.exponential import exp, silu
from engine.kernels.records import record_of
from engine.kernels.simd import (
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
    put_numbers,
    splat,
    store,
    total,
)
from engine.kernels.state.gates import gates_of, share_kept, softplus
from engine.kernels.state.walk import (
    LEAF,
    batch_row,
    fetch_part,
    kept_row,
    read_slot,
    row_count,
    rows_of,
    save_range,
    scratch_of,
    segment_count,
    share_of,
    state_of,
    step_at,
    step_range,
    stored_as,
    tiles_of,
    window_room,
)
from engine.kernels.state.windows import activated, copy, find_window, input_of, keep_parts
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

_LENGTH_EPSILON = np.float32(1e-6)  # as in transformers and in flash-linear-attention

DELTA = record_of(
    "walk",  # see `engine.kernels.state.walk`
    "inputs",  # [rows, ...]: q, k, v
    "inputs_stride",  # bytes
    "out_gates",  # z of the first row; rows are `out_gates_stride` bytes apart
    "out_gates_stride",
    "sigmoid",  # 1: what is read is multiplied by the sigmoid of z, not by SiLU(z)
    "gates",  # [rows, gate_count]: b of each value head, then a
    "gate_count",
    "forget",  # [rows, key_heads * key_dim]: of each channel of a key what a is otherwise; or 0
    "forget_bias",  # [key_heads * key_dim] float32
    "state_at",  # where the layer's part begins in a state: the window, then S
    "row_at",  # where it begins in a kept row: q, k and v, then the gates
    "taps",  # [taps, channels of q, k and v] float32
    "decay",  # [value_heads] float32: -exp(A)
    "dt_bias",  # [value_heads] float32
    "norm",  # [value_dim] float32
    "key_head_of",  # [value_heads] int32
    "out",  # [rows, value_heads * value_dim]
    "key_heads",
    "value_heads",
    "key_dim",
    "value_dim",
    "tap_count",
    "channels",
    "width",
    "window_bytes",
    floats=("epsilon", "query_scale"),
)


@kernel(DELTA)
def delta_inputs_kernel(address: Any) -> None:
    """Run the convolution, for each row and head: q and k of a key head, or v and the gates of a value head. What is to
    be kept of rows is copied to the store, and the window of each state that is stored is written.
    """
    work = carray(address, 1)[0]
    heads, places = work.key_heads + work.value_heads, window_room(work.walk, thread_id())
    for segment in range(segment_count(work.walk)):
        window = state_of(work.walk, read_slot(work.walk, segment)) + work.state_at
        first, end = rows_of(work.walk, segment)
        for row in range(first, end):
            find_window(
                work.walk, row, work.tap_count, work.inputs, work.inputs_stride, work.row_at, window,
                work.channels * work.width, places,
            )  # fmt: skip
            for head in range(thread_id(), heads, num_threads()):
                if head < work.key_heads:
                    _enter_key(work, places, head, row)
                else:
                    _enter_value(work, places, head - work.key_heads, row)
                    _enter_gates(work, row, head - work.key_heads)
                if stored_as(work.walk, row) >= 0:
                    _keep_row(work, row, head)
        first, end = save_range(work.walk, segment)
        for head in range(thread_id(), heads, num_threads()):
            for save in range(first, end):
                keep_parts(work, work.inputs, save, window, _channels_of(work, head), places)


@subroutine
def _channels_of(work: Any, head: int) -> Any:
    """Return the first channels that a unit reads, of both parts, and how many each has."""
    if head < work.key_heads:
        return head * work.key_dim, (work.key_heads + head) * work.key_dim, work.key_dim
    first = 2 * work.key_heads * work.key_dim + (head - work.key_heads) * work.value_dim
    return first, first, work.value_dim


# The scratch, in float32. Numbers of a head lie together for all rows, which a thread takes one after the other.


@subroutine
def _keys_of(work: Any, head: int, row: int) -> Any:
    """Return the address of a row's q, then k, of a key head."""
    return scratch_of(work.walk) + 8 * work.key_dim * (head * row_count(work.walk) + row)


@subroutine
def _values_of(work: Any, head: int, row: int) -> Any:
    """Return the address of a row's v, and then o, of a value head."""
    keys = 8 * work.key_heads * work.key_dim * row_count(work.walk)
    return scratch_of(work.walk) + keys + 4 * work.value_dim * (head * row_count(work.walk) + row)


@subroutine
def _alike_of(work: Any, head: int, row: int) -> Any:
    """Return the address of a row's k^T q of a key head."""
    rows = row_count(work.walk)
    return scratch_of(work.walk) + 4 * (work.channels + 2 * work.value_heads) * rows + 4 * (head * rows + row)


@subroutine
def _decays_of(work: Any, head: int, row: int) -> Any:
    """Return the address of a row's k of a key head, and then of the share that each of its channels keeps."""
    rows = row_count(work.walk)
    before = 4 * (work.channels + 2 * work.value_heads + work.key_heads) * rows
    return scratch_of(work.walk) + before + 8 * work.key_dim * (head * rows + row)


@subroutine
def _enter_key(work: Any, places: int, head: int, row: int) -> None:
    """Write q and k of a key head, of length 1; q is then scaled. Also k^T q."""
    query, to_key = _keys_of(work, head, row), 4 * work.key_dim
    for part in range(2):
        channel, goal = (part * work.key_heads + head) * work.key_dim, query + part * to_key
        squares = splat(np.float32(0))
        for at in range(0, work.key_dim, LANES):
            x = activated(work, places, channel + at, splat(np.float32(0)))
            squares = fma(x, x, squares)
            store(x, goal + 4 * at, FLOAT32)
        scale = np.float32(1) / np.sqrt(total(squares) + _LENGTH_EPSILON)
        if part == 0:
            scale *= work.query_scale
        for at in range(goal, goal + to_key, 4 * LANES):
            store(multiply(load(at, FLOAT32), splat(scale)), at, FLOAT32)
    alike = splat(np.float32(0))
    for at in range(query, query + to_key, 4 * LANES):
        alike = fma(load(at, FLOAT32), load(at + to_key, FLOAT32), alike)
    put_float(_alike_of(work, head, row), total(alike))
    if work.forget != 0:
        _enter_decays(work, head, row)


@subroutine
def _enter_decays(work: Any, head: int, row: int) -> None:
    """Keep k of a key head, and the share that each of its channels keeps. What reads the state before the row is then
    q and k times these shares.
    """
    query, to_key = _keys_of(work, head, row), 4 * work.key_dim
    key, shares = _decays_of(work, head, row), _decays_of(work, head, row) + to_key
    stride = work.key_heads * work.key_dim * work.width
    forget = input_of(work.walk, row, work.forget, stride, _kept_forget(work)) + head * work.key_dim * work.width
    bias = work.forget_bias + head * to_key
    for i in range(work.key_dim):
        step = np.float64(number_at(forget + i * work.width, work.width)) + np.float64(float_at(bias + 4 * i))
        share = share_kept(work, head, softplus(step))
        put_float(key + 4 * i, float_at(query + to_key + 4 * i))
        put_float(shares + 4 * i, share)
        put_float(query + 4 * i, float_at(query + 4 * i) * share)
        put_float(query + to_key + 4 * i, float_at(query + to_key + 4 * i) * share)


@subroutine
def _enter_value(work: Any, places: int, head: int, row: int) -> None:
    channel, goal = 2 * work.key_heads * work.key_dim + head * work.value_dim, _values_of(work, head, row)
    for at in range(0, work.value_dim, LANES):
        store(activated(work, places, channel + at, splat(np.float32(0))), goal + 4 * at, FLOAT32)


@subroutine
def _enter_gates(work: Any, row: int, head: int) -> None:
    """Write exp(g) and beta of a value head, by float64 for a row's bits to be those of one function."""
    gates = input_of(work.walk, row, work.gates, work.gate_count * work.width, _kept_gates(work))
    b, place = np.float64(number_at(gates + head * work.width, work.width)), gates_of(work, head, row)
    if work.forget == 0:
        a = np.float64(number_at(gates + (work.value_heads + head) * work.width, work.width))
        a += np.float64(float_at(work.dt_bias + 4 * head))
        put_float(place, share_kept(work, head, softplus(a)))
    put_float(place + 4, np.float32(1.0 / (1.0 + math.exp(-b))))


@subroutine
def _kept_gates(work: Any) -> Any:
    """Return where the gates are in a kept row."""
    return work.row_at + work.channels * work.width


@subroutine
def _kept_forget(work: Any) -> Any:
    """Return where what channels forget is in a kept row."""
    return _kept_gates(work) + work.gate_count * work.width


@subroutine
def _keep_row(work: Any, row: int, head: int) -> None:
    """Copy a unit's part of a row's inputs and gates to the store."""
    at, place = batch_row(work.walk, row), kept_row(work.walk, stored_as(work.walk, row))
    first, second, count = _channels_of(work, head)
    source = work.inputs + at * work.inputs_stride
    copy(source + first * work.width, place + work.row_at + first * work.width, count * work.width)
    if head < work.key_heads:
        copy(source + second * work.width, place + work.row_at + second * work.width, count * work.width)
        if work.forget != 0:
            forget = work.forget + (at * work.key_heads + head) * count * work.width
            copy(forget, place + _kept_forget(work) + head * count * work.width, count * work.width)
        return
    gates, kept = work.gates + at * work.gate_count * work.width, place + _kept_gates(work)
    for i in range(head - work.key_heads, work.gate_count, work.value_heads):
        for half in range(0, work.width, 2):
            copy_half(gates + i * work.width + half, kept + i * work.width + half)


@kernel(DELTA)
def delta_kernel(address: Any) -> None:
    """Take the rows through the states: for each request, value head and 16 columns.

    A state is updated for a row while the next row reads it, and is so read and written once a row.
    """
    work = carray(address, 1)[0]
    tiles, size = work.value_dim // LANES, 4 * work.key_dim * LANES
    begin, stop = share_of(work.value_heads * tiles)
    levels = tiles_of(work.walk, thread_id())
    for segment in range(segment_count(work.walk)):
        first, end = step_range(work.walk, segment)
        for tile in range(begin, stop):
            head, state_at = tile // tiles, work.state_at + work.window_bytes + tile * size
            key_head = int_at(work.key_head_of + 4 * head)
            column = 4 * LANES * (tile % tiles)
            fetch_part(state_of(work.walk, read_slot(work.walk, segment)) + state_at + size, size)
            before, state, key_before = 0, 0, 0  # of the row whose update is due; before is 0 if none is
            decay, delta = np.float32(0), splat(np.float32(0))
            for step in range(first, end):
                row, source, goal = step_at(work.walk, step)
                old = levels + source * size if source >= 0 else state_of(work.walk, ~source) + state_at
                gates, query = gates_of(work, head, row), _keys_of(work, key_head, row)
                value, alike = _values_of(work, head, row) + column, float_at(_alike_of(work, key_head, row))
                if work.forget != 0:
                    delta = _advance(
                        0, old, 0, decay, delta, query, query + 4 * work.key_dim, value, alike, np.float32(1),
                        float_at(gates + 4), work.key_dim,
                    )  # fmt: skip
                    if goal != LEAF:
                        state = levels + goal * size if goal >= 0 else state_of(work.walk, ~goal) + state_at
                        _update_channels(old, state, _decays_of(work, key_head, row), delta, work.key_dim)
                    continue
                key, next_decay = query + 4 * work.key_dim, float_at(gates)
                delta = _advance(
                    before, old, key_before, decay, delta, query, key, value, alike, next_decay, float_at(gates + 4),
                    work.key_dim,
                )  # fmt: skip
                before, key_before, decay = 0 if goal == LEAF else old, key, next_decay
                state = levels + goal * size if goal >= 0 else state_of(work.walk, ~goal) + state_at
            if before != 0:
                _update(before, state, key_before, decay, delta, work.key_dim)


@subroutine
def _advance(
    before: int, state: int, key_before: int, decay_before: Any, delta_before: Any, query: int, key: int, value: int,
    alike: Any, decay: Any, beta: Any, count: int,
) -> Any:  # fmt: skip
    """Let one row read 16 columns of a state, [count, 16], and write o in the place of v. Returns the row's d.

    before: unless it is 0, the state is first made of the one there, the row before (key_before, decay_before) and
    that row's d. alike: k^T q, so that o = exp(g) S^T q + k^T q d of the state before the row.
    """
    zero, kept = splat(np.float32(0)), splat(decay_before)
    a, b, c, d = zero, zero, zero, zero
    e, f, g, h = zero, zero, zero, zero
    if before == 0:
        for i in range(0, 4 * count, 16):
            s, t = load(state + 16 * i, FLOAT32), load(state + 16 * i + 64, FLOAT32)
            u, v = load(state + 16 * i + 128, FLOAT32), load(state + 16 * i + 192, FLOAT32)
            a, e = fma(s, splat(float_at(key + i)), a), fma(s, splat(float_at(query + i)), e)
            b, f = fma(t, splat(float_at(key + i + 4)), b), fma(t, splat(float_at(query + i + 4)), f)
            c, g = fma(u, splat(float_at(key + i + 8)), c), fma(u, splat(float_at(query + i + 8)), g)
            d, h = fma(v, splat(float_at(key + i + 12)), d), fma(v, splat(float_at(query + i + 12)), h)
    else:
        for i in range(0, 4 * count, 16):
            s, t = load(before + 16 * i, FLOAT32), load(before + 16 * i + 64, FLOAT32)
            u, v = load(before + 16 * i + 128, FLOAT32), load(before + 16 * i + 192, FLOAT32)
            s = fma(splat(float_at(key_before + i)), delta_before, multiply(s, kept))
            t = fma(splat(float_at(key_before + i + 4)), delta_before, multiply(t, kept))
            u = fma(splat(float_at(key_before + i + 8)), delta_before, multiply(u, kept))
            v = fma(splat(float_at(key_before + i + 12)), delta_before, multiply(v, kept))
            a, e = fma(s, splat(float_at(key + i)), a), fma(s, splat(float_at(query + i)), e)
            b, f = fma(t, splat(float_at(key + i + 4)), b), fma(t, splat(float_at(query + i + 4)), f)
            c, g = fma(u, splat(float_at(key + i + 8)), c), fma(u, splat(float_at(query + i + 8)), g)
            d, h = fma(v, splat(float_at(key + i + 12)), d), fma(v, splat(float_at(query + i + 12)), h)
            store(s, state + 16 * i, FLOAT32)
            store(t, state + 16 * i + 64, FLOAT32)
            store(u, state + 16 * i + 128, FLOAT32)
            store(v, state + 16 * i + 192, FLOAT32)
    recalled = add(add(a, b), add(c, d))
    delta = multiply(splat(beta), fma(recalled, splat(-decay), load(value, FLOAT32)))
    store(fma(splat(alike), delta, multiply(splat(decay), add(add(e, f), add(g, h)))), value, FLOAT32)
    return delta


@subroutine
def _update(before: int, state: int, key: int, decay: Any, delta: Any, count: int) -> None:
    """Make the state after a row of the one before it."""
    kept = splat(decay)
    for i in range(0, 4 * count, 4):
        s = multiply(load(before + 16 * i, FLOAT32), kept)
        store(fma(splat(float_at(key + i)), delta, s), state + 16 * i, FLOAT32)


@subroutine
def _update_channels(before: int, state: int, key: int, delta: Any, count: int) -> None:
    """Do the same where channels keep shares of their own, which lie after the key."""
    for i in range(0, 4 * count, 4):
        s = multiply(load(before + 16 * i, FLOAT32), splat(float_at(key + 4 * count + i)))
        store(fma(splat(float_at(key + i)), delta, s), state + 16 * i, FLOAT32)


@kernel(DELTA)
def delta_out_kernel(address: Any) -> None:
    """Write out = RMSNorm(o) * w * SiLU(z), or the sigmoid of z, for each row and value head."""
    work, one = carray(address, 1)[0], splat(np.float32(1))
    made = work.value_heads * work.value_dim
    for unit in range(thread_id(), row_count(work.walk) * work.value_heads, num_threads()):
        row, head = unit // work.value_heads, unit % work.value_heads
        at = batch_row(work.walk, row)
        if at < 0:
            continue
        x = _values_of(work, head, row)
        squares = splat(np.float32(0))
        for i in range(0, 4 * work.value_dim, 4 * LANES):
            numbers = load(x + i, FLOAT32)
            squares = fma(numbers, numbers, squares)
        scale = splat(np.float32(1) / np.sqrt(total(squares) / np.float32(work.value_dim) + work.epsilon))
        gate = work.out_gates + at * work.out_gates_stride + head * work.value_dim * work.width
        out = work.out + (at * made + head * work.value_dim) * work.width
        for i in range(0, work.value_dim, LANES):
            z = numbers_at(gate + i * work.width, work.width)
            numbers = multiply(multiply(load(x + 4 * i, FLOAT32), scale), load(work.norm + 4 * i, FLOAT32))
            if work.sigmoid != 0:
                numbers = divide(numbers, add(one, exp(multiply(z, splat(np.float32(-1))))))
            else:
                numbers = multiply(numbers, silu(z))
            put_numbers(numbers, out + i * work.width, work.width)
