"""Mamba-2 (Granite 4, Falcon-H1, Nemotron-H): a row decays the state of each head, adds what it writes for the row's
key, and reads it with the row's query, which the heads of a group have in common.

    S <- exp(-exp(A) dt) S + B (dt x)^T;   y = S^T C + D x;   out = Wo (RMSNorm(y * SiLU(z)) * w)

S [state_dim, head_dim] is float32, and lies in tiles of 16 of its columns, as in `delta`. x, B and C are what a causal
convolution and SiLU make of the row's inputs and those before it. dt is the softplus of the row's step and a bias,
within limits. The norm is of the numbers of a group; it may come before the gate SiLU(z), or be left out.

A commit replays a row from its inputs, before the convolution, and its step: with the same operations, so to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from engine.kernels.exponential import silu
from engine.kernels.gemm.matmul import Multiplies
from engine.kernels.records import record_of
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    copy_half,
    float_at,
    fma,
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
    BuildsSteps,
    LayerPlace,
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
from engine.kernels.state.windows import activated, copy, find_window, input_of, keep_parts, window_bytes
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

MAMBA = record_of(
    "walk",  # see `engine.kernels.state.walk`
    "inputs",  # [rows, ...]: z and x of each head, B of each group, C of each group, the step of each head
    "mixed",  # where x begins in the first of these rows
    "inputs_stride",  # bytes
    "state_at",  # where the layer's part begins in a state: the window, then S
    "row_at",  # where it begins in a kept row: x, B and C, then the steps
    "taps",  # [taps, channels of x, B and C] float32
    "bias",  # [channels] float32, of the convolution
    "decay",  # [heads] float32: -exp(A)
    "dt_bias",  # [heads] float32
    "skip",  # [heads] float32: D
    "norm",  # [heads * head_dim] float32, or 0
    "gate_last",  # 1: the gate multiplies what the norm gives
    "out",  # [rows, heads * head_dim]
    "heads",
    "groups",
    "head_dim",
    "state_dim",
    "tap_count",
    "channels",
    "width",
    "window_bytes",
    # the limits of dt, and what multiplies z and a step
    floats=("epsilon", "shortest", "longest", "gate_scale", "step_scale"),
)


def mamba_sizes(heads: int, groups: int, head_dim: int, state_dim: int, taps: int, width: int) -> tuple[int, int]:
    """Return the bytes of a layer's state, and of what is kept of a row. width: bytes of a number of its inputs."""
    channels = heads * head_dim + 2 * groups * state_dim
    return window_bytes(channels, taps, width) + 4 * heads * head_dim * state_dim, (channels + heads) * width


@dataclass(frozen=True)
class Mamba:
    """inputs: hidden to z and x of each head, B and C of each group, and a step of each head. taps: [taps, channels of
    x, B and C] float32; bias: of the convolution; decay: -exp(A); skip: D. norm: [heads * head_dim] float32, if there
    is one; gate_last: the gate comes after it. steps: the limits of dt. gate_scale, step_scale: what multiplies z and
    the step. width: bytes of a number of rows.
    """

    inputs: Multiplies
    out: Multiplies
    taps: Tensor
    bias: Tensor
    decay: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    gate_last: bool
    epsilon: float
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    steps: tuple[float, float]
    width: int
    gate_scale: float = 1.0
    step_scale: float = 1.0

    @property
    def _sizes(self) -> tuple[int, int]:
        sizes = self.heads, self.groups, self.head_dim, self.state_dim
        return mamba_sizes(*sizes, len(self.taps), self.width)

    @property
    def state_bytes(self) -> int:
        return self._sizes[0]

    @property
    def row_bytes(self) -> int:
        return self._sizes[1]

    @property
    def scratch_bytes(self) -> int:
        channels: int = self.taps.shape[1]
        return 4 * (channels + 2 * self.heads)

    @property
    def tile_bytes(self) -> int:
        return 4 * self.state_dim * LANES

    def build(self, program: BuildsSteps, place: LayerPlace) -> str:
        """See `StateLayer`."""
        channels, made = self.taps.shape[1], self.heads * self.head_dim
        program.product(self.inputs, "x", "state_inputs", made + channels + self.heads)
        inputs = program.buffer("state_inputs", 0)
        record = np.zeros(1, MAMBA)
        fields = {
            "walk": place.walk,
            "inputs": inputs.data_ptr(),
            "mixed": inputs.data_ptr() + made * inputs.itemsize,
            "inputs_stride": inputs.stride(0) * inputs.itemsize,
            "state_at": place.state,
            "row_at": place.row,
            "taps": self.taps.data_ptr(),
            "bias": self.bias.data_ptr(),
            "decay": self.decay.data_ptr(),
            "dt_bias": self.dt_bias.data_ptr(),
            "skip": self.skip.data_ptr(),
            "norm": 0 if self.norm is None else self.norm.data_ptr(),
            "gate_last": self.gate_last,
            "out": program.buffer("mixed", made).data_ptr(),
            "heads": self.heads,
            "groups": self.groups,
            "head_dim": self.head_dim,
            "state_dim": self.state_dim,
            "tap_count": len(self.taps),
            "channels": channels,
            "width": self.width,
            "window_bytes": window_bytes(channels, len(self.taps), self.width),
            "epsilon": self.epsilon,
            "shortest": self.steps[0],
            "longest": self.steps[1],
            "gate_scale": self.gate_scale,
            "step_scale": self.step_scale,
        }
        for name, value in fields.items():
            record[name] = value
        for step in (mamba_inputs_kernel, mamba_kernel, mamba_out_kernel):
            program.step(step(), record)
        return "mixed"


@kernel(MAMBA)
def mamba_inputs_kernel(address: Any) -> None:
    """Convolve each row: B and C of a group, or x and the step of a head. What is to be kept of rows is
    copied to the store, and the window of each state that is stored is written.
    """
    work = carray(address, 1)[0]
    units, places = work.groups + work.heads, window_room(work.walk, thread_id())
    for segment in range(segment_count(work.walk)):
        window = state_of(work.walk, read_slot(work.walk, segment)) + work.state_at
        first, end = rows_of(work.walk, segment)
        for row in range(first, end):
            find_window(
                work.walk, row, work.tap_count, work.mixed, work.inputs_stride, work.row_at, window,
                work.channels * work.width, places,
            )  # fmt: skip
            for unit in range(thread_id(), units, num_threads()):
                if unit < work.groups:
                    _enter_group(work, places, unit, row)
                else:
                    _enter_head(work, places, unit - work.groups, row)
                if stored_as(work.walk, row) >= 0:
                    _keep_row(work, row, unit)
        first, end = save_range(work.walk, segment)
        for unit in range(thread_id(), units, num_threads()):
            for save in range(first, end):
                keep_parts(work, work.mixed, save, window, _channels_of(work, unit), places)


@subroutine
def _channels_of(work: Any, unit: int) -> Any:
    """Return the first channels that a unit reads, of both parts, and how many each has."""
    if unit < work.groups:
        first = work.heads * work.head_dim + unit * work.state_dim
        return first, first + work.groups * work.state_dim, work.state_dim
    first = (unit - work.groups) * work.head_dim
    return first, first, work.head_dim


@subroutine
def _enter_channels(work: Any, places: int, first: int, count: int, goal: int) -> None:
    """Write SiLU of the convolution of `count` channels from `first` on to `goal`."""
    for at in range(first, first + count, LANES):
        x = activated(work, places, at, load(work.bias + 4 * at, FLOAT32))
        store(x, goal + 4 * (at - first), FLOAT32)


# The scratch, in float32. Numbers of a head or group lie together for all rows, which a thread takes one after the
# other.


@subroutine
def _keys_of(work: Any, group: int, row: int) -> Any:
    """Return the address of a row's B, then C, of a group."""
    return scratch_of(work.walk) + 8 * work.state_dim * (group * row_count(work.walk) + row)


@subroutine
def _values_of(work: Any, head: int, row: int) -> Any:
    """Return the address of a row's x, and then y, of a head."""
    keys = 8 * work.groups * work.state_dim * row_count(work.walk)
    return scratch_of(work.walk) + keys + 4 * work.head_dim * (head * row_count(work.walk) + row)


@subroutine
def _enter_group(work: Any, places: int, group: int, row: int) -> None:
    first, second, count = _channels_of(work, group)
    goal = _keys_of(work, group, row)
    _enter_channels(work, places, first, count, goal)
    _enter_channels(work, places, second, count, goal + 4 * count)


@subroutine
def _enter_head(work: Any, places: int, head: int, row: int) -> None:
    """Write x of a head; and its gates, by float64 for a row's bits to be those of one function."""
    _enter_channels(work, places, head * work.head_dim, work.head_dim, _values_of(work, head, row))
    steps = input_of(work.walk, row, work.mixed, work.inputs_stride, work.row_at) + work.channels * work.width
    step = np.float64(number_at(steps + head * work.width, work.width)) * np.float64(work.step_scale)
    step += np.float64(float_at(work.dt_bias + 4 * head))
    dt = min(max(softplus(step), np.float64(work.shortest)), np.float64(work.longest))
    place = gates_of(work, head, row)
    put_float(place, share_kept(work, head, dt))
    put_float(place + 4, np.float32(dt))


@subroutine
def _keep_row(work: Any, row: int, unit: int) -> None:
    """Copy a unit's part of a row's inputs to the store."""
    source = work.mixed + batch_row(work.walk, row) * work.inputs_stride
    place, size = kept_row(work.walk, stored_as(work.walk, row)) + work.row_at, work.width
    first, second, count = _channels_of(work, unit)
    copy(source + first * size, place + first * size, count * size)
    if unit < work.groups:
        copy(source + second * size, place + second * size, count * size)
        return
    step = (work.channels + unit - work.groups) * size
    for half in range(step, step + size, 2):
        copy_half(source + half, place + half)


@kernel(MAMBA)
def mamba_kernel(address: Any) -> None:
    """Take the rows through the states: for each request, head and 16 columns. A row that is replayed is not read, and
    what no other row needs is not written.
    """
    work = carray(address, 1)[0]
    tiles, size, each = work.head_dim // LANES, 4 * work.state_dim * LANES, work.heads // work.groups
    begin, stop = share_of(work.heads * tiles)
    levels = tiles_of(work.walk, thread_id())
    for segment in range(segment_count(work.walk)):
        first, end = step_range(work.walk, segment)
        for tile in range(begin, stop):
            head, state_at = tile // tiles, work.state_at + work.window_bytes + tile * size
            fetch_part(state_of(work.walk, read_slot(work.walk, segment)) + state_at + size, size)
            for step in range(first, end):
                row, source, goal = step_at(work.walk, step)
                old = levels + source * size if source >= 0 else state_of(work.walk, ~source) + state_at
                new = levels + goal * size if goal >= 0 else state_of(work.walk, ~goal) + state_at
                gates, keys = gates_of(work, head, row), _keys_of(work, head // each, row)
                value = _values_of(work, head, row) + 4 * LANES * (tile % tiles)
                x, kept = load(value, FLOAT32), splat(float_at(gates))
                written = multiply(x, splat(float_at(gates + 4)))
                if batch_row(work.walk, row) >= 0:
                    y = _advance(old, 0 if goal == LEAF else new, keys, kept, written, work.state_dim)
                    store(fma(x, splat(float_at(work.skip + 4 * head)), y), value, FLOAT32)
                elif goal != LEAF:
                    _replay(old, new, keys, kept, written, work.state_dim)


@subroutine
def _stepped(old: int, key: int, kept: Any, written: Any) -> Any:
    """Return 16 numbers of a state after a row, from those before it. key: the address of their number of B."""
    return fma(splat(float_at(key)), written, multiply(load(old, FLOAT32), kept))


@subroutine
def _replay(old: int, new: int, keys: int, kept: Any, written: Any, count: int) -> None:
    """Write the state after a row, [count, 16], from the one before it."""
    for i in range(0, 4 * count, 4):
        store(_stepped(old + 16 * i, keys + i, kept, written), new + 16 * i, FLOAT32)


@subroutine
def _advance(old: int, new: int, keys: int, kept: Any, written: Any, count: int) -> Any:
    """Return what a row reads of the state after it, which is stored at `new` unless that is 0."""
    a = splat(np.float32(0))
    b, c, d, queries = a, a, a, keys + 4 * count
    for i in range(0, 4 * count, 16):
        s, t = _stepped(old + 16 * i, keys + i, kept, written), _stepped(old + 16 * i + 64, keys + i + 4, kept, written)
        u = _stepped(old + 16 * i + 128, keys + i + 8, kept, written)
        v = _stepped(old + 16 * i + 192, keys + i + 12, kept, written)
        if new != 0:
            store(s, new + 16 * i, FLOAT32)
            store(t, new + 16 * i + 64, FLOAT32)
            store(u, new + 16 * i + 128, FLOAT32)
            store(v, new + 16 * i + 192, FLOAT32)
        a, b = fma(s, splat(float_at(queries + i)), a), fma(t, splat(float_at(queries + i + 4)), b)
        c, d = fma(u, splat(float_at(queries + i + 8)), c), fma(v, splat(float_at(queries + i + 12)), d)
    return add(add(a, b), add(c, d))


@kernel(MAMBA)
def mamba_out_kernel(address: Any) -> None:
    """Apply the norm and the gate to each row and group."""
    work = carray(address, 1)[0]
    each, made = work.heads // work.groups, work.heads * work.head_dim
    size = each * work.head_dim
    for unit in range(thread_id(), row_count(work.walk) * work.groups, num_threads()):
        row, group = unit // work.groups, unit % work.groups
        at = batch_row(work.walk, row)
        if at < 0:
            continue
        squares = splat(np.float32(0))
        for head in range(group * each, (group + 1) * each):
            y, gate = _values_of(work, head, row), _gate_of(work, head, at)
            for i in range(0, work.head_dim, LANES):
                x = load(y + 4 * i, FLOAT32)
                if work.gate_last == 0:
                    x = multiply(x, _gate(work, gate + i * work.width))
                    store(x, y + 4 * i, FLOAT32)
                squares = fma(x, x, squares)
        # without a norm there is no epsilon either, and a row of zeros (a padding token's) would be divided by 0
        mean = total(squares) / np.float32(size) + work.epsilon if work.norm != 0 else np.float32(1)
        scale = splat(np.float32(1) / np.sqrt(mean))
        for head in range(group * each, (group + 1) * each):
            y, gate, first = _values_of(work, head, row), _gate_of(work, head, at), head * work.head_dim
            out = work.out + (at * made + first) * work.width
            for i in range(0, work.head_dim, LANES):
                x = load(y + 4 * i, FLOAT32)
                if work.norm != 0:
                    x = multiply(multiply(x, scale), load(work.norm + 4 * (first + i), FLOAT32))
                if work.gate_last != 0:
                    x = multiply(x, _gate(work, gate + i * work.width))
                put_numbers(x, out + i * work.width, work.width)


@subroutine
def _gate_of(work: Any, head: int, at: int) -> Any:
    """Return the address of a row's z of a head."""
    return work.inputs + at * work.inputs_stride + head * work.head_dim * work.width


@subroutine
def _gate(work: Any, address: int) -> Any:
    """Return SiLU of 16 numbers of z."""
    return silu(multiply(numbers_at(address, work.width), splat(work.gate_scale)))
