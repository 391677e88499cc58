"""Gated delta nets on CUDA: `engine.kernels.state.delta` as Triton kernels over the same states and kept rows.

A program takes the rows of a request through 16 columns of a value head's state, which stays in its registers: it is
read and written once a forward, however many rows there are. A row's result is a fixed sequence of operations over its
ancestors, whatever rows are beside it. Every kernel spreads its work over as many programs as the device runs at once,
so that one graph serves any tree and any number of requests (`engine.model.cuda.device_walk`).

Without a GPU the tests run these kernels through Triton's interpreter, and compile them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton allows only constexpr annotations on a kernel's parameters.
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.simd import LANES
from engine.kernels.state.windows import window_bytes
from engine.model.cuda.device_walk import HELD, MOST_KEPT, NOWHERE, most_levels

_PROGRAMS, _SMALL_PROGRAMS = 4, 16  # for each multiprocessor, of four warps and of one
_FEW_PROGRAMS = 3  # programs where there is no GPU
_PART = 256  # channels of a window that a program copies
_UNFUSED = {"enable_fp_fusion": False}


class DeltaNet(NamedTuple):
    """See `engine.kernels.state.delta.GatedDelta`. Neighbouring value heads share a key head."""

    taps: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    epsilon: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class LayerStates(NamedTuple):
    """Where the layer's parts are of all states, [slots, bytes] uint8, and of all kept rows, [rows, bytes] uint8. Each
    begins at that byte.
    """

    states: Tensor
    store: Tensor
    state_at: int
    row_at: int


@triton.jit
def _input_of(
    inputs, store, windows, rows, row, slot, oldest,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, SLOT: tl.constexpr, WINDOW_AT: tl.constexpr,
    STORE_ROW: tl.constexpr, ROW_AT: tl.constexpr,
):  # fmt: skip
    """Return where a row's inputs are: a new row's, a kept one's, or, for row -1, in place `oldest` of the state's
    window.
    """
    place = tl.load(rows + 4 * row + 1, mask=row >= 0, other=0).to(tl.int64)
    held = tl.where(place >= 0, inputs + place * STRIDE, store + ~place * STORE_ROW + ROW_AT)
    return tl.where(row < 0, windows + slot * SLOT + WINDOW_AT + oldest * CHANNELS, held)


@triton.jit
def _convolved(
    inputs, store, windows, taps, rows, row, channel,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    SLOT: tl.constexpr, WINDOW_AT: tl.constexpr, STORE_ROW: tl.constexpr, ROW_AT: tl.constexpr,
):  # fmt: skip
    """Return SiLU of the convolution of WIDTH channels, [WIDTH] float32. windows: the states, as numbers of a row."""
    channels = channel + tl.arange(0, WIDTH)
    slot = tl.load(rows + 4 * row + 3).to(tl.int64)
    summed = tl.zeros([WIDTH], tl.float32)
    oldest = TAPS - 2
    for back in tl.static_range(TAPS):
        place = _input_of(
            inputs, store, windows, rows, row, slot, oldest, STRIDE, CHANNELS, SLOT, WINDOW_AT, STORE_ROW, ROW_AT
        )
        summed += tl.load(place + channels).to(tl.float32) * tl.load(taps + (TAPS - 1 - back) * CHANNELS + channels)
        oldest = tl.where(row < 0, oldest - 1, oldest)
        row = tl.load(rows + 4 * row, mask=row >= 0, other=-1)
    return summed / (1.0 + tl.exp(-summed))


@triton.jit
def enter_rows(
    inputs,  # [rows, channels of q, k, v and z]
    gates,  # [rows, 2 * value_heads]: b, then a
    taps,  # [taps, channels of q, k and v] float32
    decay,  # [value_heads] float32
    dt_bias,  # [value_heads] float32
    windows,  # the states, as numbers of a row
    store,  # the kept rows
    walk,
    keys,  # out: [walked rows, key_heads, 2, key_dim] float32: q, then k
    values,  # out: [walked rows, value_heads, value_dim] float32: v
    factors,  # out: [walked rows, key_heads + 2 * value_heads] float32: k^T q, exp(g) and beta
    query_scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SLOT: tl.constexpr,
    WINDOW_AT: tl.constexpr,
    STORE_ROW: tl.constexpr,
    ROW_AT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Convolve a row's inputs; make q and k of a key head, or v and the gates of a value head. What is to be kept of
    the row is copied to the store.
    """
    rows = walk + tl.load(walk + 3)
    factor_count: tl.constexpr = KEY_HEADS + 2 * VALUE_HEADS
    for item in range(tl.program_id(0), tl.load(walk + 1) * (KEY_HEADS + VALUE_HEADS), PROGRAMS):
        row, head = item // (KEY_HEADS + VALUE_HEADS), item % (KEY_HEADS + VALUE_HEADS)
        new = tl.load(rows + 4 * row + 1).to(tl.int64)
        number = tl.load(rows + 4 * row + 2).to(tl.int64)
        kept = store + number * STORE_ROW + ROW_AT
        of_row = factors + row * factor_count
        if head < KEY_HEADS:
            dim = tl.arange(0, KEY_DIM)
            out = keys + (row * KEY_HEADS + head) * 2 * KEY_DIM
            query = tl.zeros([KEY_DIM], tl.float32)
            for part in tl.static_range(2):
                channel = (part * KEY_HEADS + head) * KEY_DIM
                x = _convolved(
                    inputs, store, windows, taps, rows, row, channel,
                    STRIDE, CHANNELS, TAPS, KEY_DIM, SLOT, WINDOW_AT, STORE_ROW, ROW_AT,
                )  # fmt: skip
                x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) + 1e-6))  # the epsilon of transformers
                if part == 0:
                    x = x * query_scale
                    query = x
                else:
                    tl.store(of_row + head, tl.sum(query * x, 0))
                tl.store(out + part * KEY_DIM + dim, x)
                if number >= 0:
                    tl.store(kept + channel + dim, tl.load(inputs + new * STRIDE + channel + dim))
        else:
            value_head = head - KEY_HEADS
            dim = tl.arange(0, VALUE_DIM)
            channel = 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
            x = _convolved(
                inputs, store, windows, taps, rows, row, channel,
                STRIDE, CHANNELS, TAPS, VALUE_DIM, SLOT, WINDOW_AT, STORE_ROW, ROW_AT,
            )  # fmt: skip
            tl.store(values + (row * VALUE_HEADS + value_head) * VALUE_DIM + dim, x)
            of_new = gates + new * 2 * VALUE_HEADS + value_head
            of_kept = store + ~new * STORE_ROW + ROW_AT + CHANNELS + value_head
            b = tl.load(of_new, mask=new >= 0, other=0.0)
            b = tl.where(new >= 0, b, tl.load(of_kept, mask=new < 0, other=0.0))
            a = tl.load(of_new + VALUE_HEADS, mask=new >= 0, other=0.0)
            a = tl.where(new >= 0, a, tl.load(of_kept + VALUE_HEADS, mask=new < 0, other=0.0))
            if number >= 0:
                tl.store(kept + channel + dim, tl.load(inputs + new * STRIDE + channel + dim))
                tl.store(kept + CHANNELS + value_head, b)
                tl.store(kept + CHANNELS + VALUE_HEADS + value_head, a)
            step = a.to(tl.float32) + tl.load(dt_bias + value_head)
            grown = tl.exp(tl.minimum(step, 20.0))  # for softplus, which is log(1 + grown)
            one_more = 1.0 + grown
            exact = tl.where(one_more == 1.0, grown, tl.log(one_more) * (grown / (one_more - 1.0)))
            step = tl.where(step > 20.0, step, exact)
            tl.store(of_row + KEY_HEADS + value_head, tl.exp(tl.load(decay + value_head) * step))
            tl.store(of_row + KEY_HEADS + VALUE_HEADS + value_head, 1.0 / (1.0 + tl.exp(-b.to(tl.float32))))


@triton.jit
def walk_states(
    keys,
    values,
    factors,
    read,  # out: as values: o
    states,  # as float32
    scratch,  # [programs, levels, key_dim, columns] float32
    walk,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOT: tl.constexpr,
    STATE_AT: tl.constexpr,
    LEVELS: tl.constexpr,
    HELD: tl.constexpr,
    NOWHERE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Take a request's rows through some columns of a value head's state, depth first."""
    tiles: tl.constexpr = VALUE_DIM // COLUMNS
    size: tl.constexpr = KEY_DIM * COLUMNS
    factor_count: tl.constexpr = KEY_HEADS + 2 * VALUE_HEADS
    segments, steps = walk + tl.load(walk + 2), walk + tl.load(walk + 4)
    dim, column = tl.arange(0, KEY_DIM), tl.arange(0, COLUMNS)
    inside = dim[:, None] * COLUMNS + column[None, :]
    levels = scratch + tl.program_id(0).to(tl.int64) * (LEVELS * size) + inside
    for item in range(tl.program_id(0), tl.load(walk) * (VALUE_HEADS * tiles), PROGRAMS):
        segment, head, tile = item // (VALUE_HEADS * tiles), item // tiles % VALUE_HEADS, item % tiles
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        slots = states + STATE_AT + (head * tiles + tile) * size + inside
        state = tl.zeros([KEY_DIM, COLUMNS], tl.float32)
        for step in range(tl.load(segments + 4 * segment), tl.load(segments + 4 * segment + 1)):
            row = tl.load(steps + 3 * step).to(tl.int64)
            source, goal = tl.load(steps + 3 * step + 1), tl.load(steps + 3 * step + 2)
            if source != HELD:
                tl.debug_barrier()  # threads read what others have stored
                if source < 0:
                    state = tl.load(slots + (~source).to(tl.int64) * SLOT)
                else:
                    state = tl.load(levels + source * size)
            query_at = keys + (row * KEY_HEADS + key_head) * 2 * KEY_DIM + dim
            query, key = tl.load(query_at), tl.load(query_at + KEY_DIM)
            of_row = factors + row * factor_count
            alike, kept = tl.load(of_row + key_head), tl.load(of_row + KEY_HEADS + head)
            beta = tl.load(of_row + KEY_HEADS + VALUE_HEADS + head)
            value_at = (row * VALUE_HEADS + head) * VALUE_DIM + tile * COLUMNS + column
            recalled = tl.sum(state * key[:, None], 0)
            delta = beta * (tl.load(values + value_at) - kept * recalled)
            tl.store(read + value_at, kept * tl.sum(state * query[:, None], 0) + alike * delta)
            if goal != NOWHERE:
                state = state * kept + key[:, None] * delta[None, :]
                if goal != HELD:
                    tl.debug_barrier()  # and store where others have read
                    if goal < 0:
                        tl.store(slots + (~goal).to(tl.int64) * SLOT, state)
                    else:
                        tl.store(levels + goal * size, state)


@triton.jit
def leave_rows(
    read,
    inputs,
    norm,  # [value_dim] float32
    walk,
    out,  # [rows, value_heads * value_dim]
    epsilon,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Compute out = RMSNorm(o) * weight * SiLU(z) of a new row and a value head."""
    rows, dim = walk + tl.load(walk + 3), tl.arange(0, VALUE_DIM)
    for item in range(tl.program_id(0), tl.load(walk + 1) * VALUE_HEADS, PROGRAMS):
        row, head = item // VALUE_HEADS, item % VALUE_HEADS
        new = tl.load(rows + 4 * row + 1).to(tl.int64)
        if new >= 0:
            x = tl.load(read + (row * VALUE_HEADS + head) * VALUE_DIM + dim)
            z = tl.load(inputs + new * STRIDE + CHANNELS + head * VALUE_DIM + dim).to(tl.float32)
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / VALUE_DIM + epsilon)) * tl.load(norm + dim)
            x = x * (z / (1.0 + tl.exp(-z)))
            tl.store(out + (new * VALUE_HEADS + head) * VALUE_DIM + dim, x.to(out.dtype.element_ty))


@triton.jit
def keep_windows(
    inputs,
    windows,  # the states, as numbers of a row
    store,
    walk,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SLOT: tl.constexpr,
    WINDOW_AT: tl.constexpr,
    STORE_ROW: tl.constexpr,
    ROW_AT: tl.constexpr,
    PART: tl.constexpr,
    TAPS_FILLED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Write some channels of the windows of a request's states that are stored, the last of which may be the one that
    is read.
    """
    parts: tl.constexpr = (CHANNELS + PART - 1) // PART
    segments, rows, saves = walk + tl.load(walk + 2), walk + tl.load(walk + 3), walk + tl.load(walk + 5)
    tap = tl.arange(0, TAPS_FILLED)[:, None]
    for item in range(tl.program_id(0), tl.load(walk) * parts, PROGRAMS):
        segment, channels = item // parts, item % parts * PART + tl.arange(0, PART)
        there = channels < CHANNELS
        for save in range(tl.load(segments + 4 * segment + 2), tl.load(segments + 4 * segment + 3)):
            row, slot = tl.load(saves + 2 * save), tl.load(saves + 2 * save + 1).to(tl.int64)
            read = tl.load(rows + 4 * row + 3).to(tl.int64)
            window = tl.zeros([TAPS_FILLED, PART], inputs.dtype.element_ty)
            oldest = TAPS - 2
            for back in tl.static_range(TAPS - 1):
                place = _input_of(
                    inputs, store, windows, rows, row, read, oldest,
                    STRIDE, CHANNELS, SLOT, WINDOW_AT, STORE_ROW, ROW_AT,
                )  # fmt: skip
                x = tl.load(place + channels, mask=there, other=0.0)
                window = tl.where(tap == TAPS - 2 - back, x[None, :], window)
                oldest = tl.where(row < 0, oldest - 1, oldest)
                row = tl.load(rows + 4 * row, mask=row >= 0, other=-1)
            tl.debug_barrier()  # threads store what others have read
            goal = windows + slot * SLOT + WINDOW_AT + tap * CHANNELS + channels[None, :]
            tl.store(goal, window, mask=(tap < TAPS - 1) & there[None, :])


def run_delta(net: DeltaNet, inputs: Tensor, gates: Tensor, places: LayerStates, walk: Tensor) -> Tensor:
    """Return [rows, value_heads * value_dim] of a layer's inputs, [rows, q, k, v and z], and gates, [rows, b and a].
    walk: see `walk_tensor`. Rows that it does not know become zeros.
    """
    rows, (taps, channels), device = len(inputs), net.taps.shape, inputs.device
    width, walked = inputs.itemsize, rows + MOST_KEPT
    programs, small = _programs(device, _PROGRAMS), _programs(device, _SMALL_PROGRAMS)
    keys = inputs.new_empty(walked, net.key_heads, 2, net.key_dim, dtype=torch.float32)
    values = inputs.new_empty(walked, net.value_heads, net.value_dim, dtype=torch.float32)
    factors = inputs.new_empty(walked, net.key_heads + 2 * net.value_heads, dtype=torch.float32)
    levels = most_levels(walked)
    scratch = inputs.new_empty(programs, levels, net.key_dim, LANES, dtype=torch.float32)
    found, out = torch.empty_like(values), inputs.new_zeros(rows, net.value_heads * net.value_dim)
    windows, store = places.states.view(inputs.dtype), places.store.view(inputs.dtype)
    of_inputs = {
        "STRIDE": inputs.stride(0), "CHANNELS": channels, "TAPS": taps, "SLOT": windows.stride(0),
        "WINDOW_AT": places.state_at // width, "STORE_ROW": store.stride(0), "ROW_AT": places.row_at // width,
    }  # fmt: skip
    heads = {"VALUE_HEADS": net.value_heads, "VALUE_DIM": net.value_dim}
    of_keys = {"KEY_HEADS": net.key_heads, "KEY_DIM": net.key_dim}
    scale = 1 / math.sqrt(net.key_dim)
    enter_rows[(small,)](
        inputs, gates, net.taps, net.decay, net.dt_bias, windows, store, walk, keys, values, factors, scale,
        PROGRAMS=small, num_warps=1, **of_inputs, **heads, **of_keys, **_UNFUSED,
    )  # fmt: skip
    walk_states[(programs,)](
        keys, values, factors, found, places.states.view(torch.float32), scratch, walk,
        COLUMNS=LANES, SLOT=places.states.stride(0) // 4,
        STATE_AT=(places.state_at + window_bytes(channels, taps, width)) // 4, LEVELS=levels, HELD=HELD,
        NOWHERE=NOWHERE, PROGRAMS=programs, num_warps=4, **heads, **of_keys, **_UNFUSED,
    )  # fmt: skip
    leave_rows[(small,)](
        found, inputs, net.norm, walk, out, net.epsilon, STRIDE=inputs.stride(0), CHANNELS=channels, PROGRAMS=small,
        num_warps=1, **heads, **_UNFUSED,
    )  # fmt: skip
    keep_windows[(small,)](
        inputs, windows, store, walk, PART=_PART, TAPS_FILLED=triton.next_power_of_2(taps - 1), PROGRAMS=small,
        num_warps=1, **of_inputs, **_UNFUSED,
    )  # fmt: skip
    return out


def _programs(device: torch.device, each: int) -> int:
    """Return how many programs the device runs at once. each: of them, for each multiprocessor."""
    if device.type != "cuda":
        return _FEW_PROGRAMS
    return each * int(torch.cuda.get_device_properties(device).multi_processor_count)
