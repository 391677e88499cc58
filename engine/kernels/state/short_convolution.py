"""Gated short convolutions (LFM2): out = Wo (C * convolution(B * x)), where B, C and x are products of the row.

The state is the convolution's window alone, and a commit replays B * x of its rows. A thread has 16 channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from engine.kernels.gemm.matmul import Multiplies
from engine.kernels.records import record_of
from engine.kernels.simd import FLOAT32, LANES, load, multiply, numbers_at, put_numbers
from engine.kernels.state.walk import (
    BuildsSteps,
    LayerPlace,
    batch_row,
    kept_row,
    read_slot,
    rows_of,
    save_at,
    save_range,
    segment_count,
    state_of,
    stored_as,
    window_room,
)
from engine.kernels.state.windows import convolved, copy, find_window, keep_window
from engine.kernels.threads import kernel, num_threads, thread_id

SHORT_CONVOLUTION = record_of(
    "walk",  # see `engine.kernels.state.walk`
    "inputs",  # [rows, 3, channels]: B, C and x; then B, C and B * x
    "state_at",  # where the layer's part begins in a state
    "row_at",  # where it begins in a kept row
    "taps",  # [taps, channels] float32
    "bias",  # [channels] float32
    "out",  # [rows, channels]
    "tap_count",
    "channels",
    "width",
)


def short_convolution_sizes(channels: int, taps: int, width: int) -> tuple[int, int]:
    """Return the bytes of a layer's state, and of what is kept of a row. width: bytes of a number of its inputs."""
    return (taps - 1) * channels * width, channels * width


@dataclass(frozen=True)
class ShortConvolution:
    """A layer that is a gated short convolution. inputs: hidden to B, C and x. taps: [taps, channels] float32; bias:
    [channels] float32. width: bytes of a number of rows.
    """

    inputs: Multiplies
    out: Multiplies
    taps: Tensor
    bias: Tensor
    width: int

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def tile_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return short_convolution_sizes(self.taps.shape[1], len(self.taps), self.width)[0]

    @property
    def row_bytes(self) -> int:
        return short_convolution_sizes(self.taps.shape[1], len(self.taps), self.width)[1]

    def build(self, program: BuildsSteps, place: LayerPlace) -> str:
        """Add the steps to the program. See `StateLayer`."""
        channels = self.taps.shape[1]
        program.product(self.inputs, "x", "state_inputs", 3 * channels)
        record = np.zeros(1, SHORT_CONVOLUTION)
        fields = {
            "walk": place.walk,
            "inputs": program.buffer("state_inputs", 3 * channels).data_ptr(),
            "state_at": place.state,
            "row_at": place.row,
            "taps": self.taps.data_ptr(),
            "bias": self.bias.data_ptr(),
            "out": program.buffer("mixed", channels).data_ptr(),
            "tap_count": len(self.taps),
            "channels": channels,
            "width": self.width,
        }
        for name, value in fields.items():
            record[name] = value
        program.step(short_convolution_kernel(), record)
        return "mixed"


@kernel(SHORT_CONVOLUTION)
def short_convolution_kernel(address: Any) -> None:
    """Convolve 16 channels of each request's rows; what is to be kept of rows is copied to the store, and the window of
    each state that is stored is written.
    """
    work = carray(address, 1)[0]
    parts, size = work.channels // LANES, work.channels * work.width
    inputs, stride, places = work.inputs + 2 * size, 3 * size, window_room(work.walk, thread_id())
    for unit in range(thread_id(), segment_count(work.walk) * parts, num_threads()):
        segment, channel = unit // parts, unit % parts * LANES
        at, bytes_of = channel * work.width, LANES * work.width
        window = state_of(work.walk, read_slot(work.walk, segment)) + work.state_at
        first, end = rows_of(work.walk, segment)
        for row in range(first, end):
            new = batch_row(work.walk, row)
            if new < 0:
                continue
            x = inputs + new * stride + at
            gate = numbers_at(x - 2 * size, work.width)
            put_numbers(multiply(gate, numbers_at(x, work.width)), x, work.width)
            find_window(work.walk, row, work.tap_count, inputs, stride, work.row_at, window, size, places)
            mixed = convolved(
                places, work.tap_count, at, work.width, work.taps + 4 * channel, work.channels,
                load(work.bias + 4 * channel, FLOAT32),
            )  # fmt: skip
            mixed = multiply(mixed, numbers_at(x - size, work.width))
            put_numbers(mixed, work.out + new * size + at, work.width)
            number = stored_as(work.walk, row)
            if number >= 0:
                copy(x, kept_row(work.walk, number) + work.row_at + at, bytes_of)
        first, end = save_range(work.walk, segment)
        for save in range(first, end):
            row, slot = save_at(work.walk, save)
            goal = state_of(work.walk, slot) + work.state_at
            keep_window(
                work.walk, row, work.tap_count, inputs, stride, work.row_at, window, goal, size, at, bytes_of, places
            )
