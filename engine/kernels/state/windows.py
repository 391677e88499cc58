"""Causal convolutions over a row and its nearest ancestors, which may be new rows, kept rows, or in the state.

A state's window holds the inputs of the last rows, the oldest first, one fewer than the convolution has taps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.kernels.exponential import silu
from engine.kernels.simd import FLOAT32, fma, load, long_at, numbers_at, put_long
from engine.kernels.state.walk import batch_row, kept_row, parent_of, save_at, state_of
from engine.kernels.subroutine import subroutine


def taps_of(convolution: Tensor) -> Tensor:
    """Return the weights of a convolution of each channel, [channels, 1, taps] or [channels, taps], as [taps, channels]
    float32.
    """
    return convolution.detach().reshape(len(convolution), -1).t().float().contiguous()


def window_bytes(channels: int, taps: int, width: int) -> int:
    """Return the bytes of a state's window, in whole cache lines. width: bytes of a number of rows."""
    return -(-(taps - 1) * channels * width // 64) * 64


@subroutine
def input_of(walk: int, row: int, inputs: int, stride: int, kept_at: int) -> Any:
    """Return the address of a row's inputs. inputs: of the new rows, `stride` bytes apart; kept_at: where they are in a
    kept row.
    """
    at = batch_row(walk, row)
    return inputs + at * stride if at >= 0 else kept_row(walk, ~at) + kept_at


@subroutine
def find_window(
    walk: int, row: int, taps: int, inputs: int, stride: int, kept_at: int, window: int, window_stride: int, places: int
) -> None:
    """Write the addresses of the inputs that a row's convolution reads to `places`, the oldest first. window: of the
    state, its rows `window_stride` bytes apart.
    """
    oldest = taps - 2
    for tap in range(taps - 1, -1, -1):
        if row >= 0:
            put_long(places + 8 * tap, input_of(walk, row, inputs, stride, kept_at))
            row = parent_of(walk, row)
        else:
            put_long(places + 8 * tap, window + oldest * window_stride)
            oldest -= 1


@subroutine
def convolved(places: int, taps: int, at: int, width: int, weights: int, channels: int, start: Any) -> Any:
    """Return start plus the convolution of 16 channels. at: of the first of them, in bytes of a row's inputs; weights:
    the address of its first weight, of [taps, channels].
    """
    for tap in range(taps):
        x = numbers_at(long_at(places + 8 * tap) + at, width)
        start = fma(x, load(weights + 4 * tap * channels, FLOAT32), start)
    return start


@subroutine
def activated(work: Any, places: int, channel: int, bias: Any) -> Any:
    """Return SiLU of the convolution of 16 channels. work: a record with the layer's taps and the width of its rows."""
    at, weights = channel * work.width, work.taps + 4 * channel
    return silu(convolved(places, work.tap_count, at, work.width, weights, work.channels, bias))


@subroutine
def keep_window(
    walk: int, row: int, taps: int, inputs: int, stride: int, kept_at: int, window: int, goal: int, window_stride: int,
    at: int, size: int, places: int,
) -> None:  # fmt: skip
    """Write the window after a row to `goal`, which may be `window` itself: `size` bytes from `at` on of each input."""
    find_window(walk, row, taps, inputs, stride, kept_at, window, window_stride, places)
    for tap in range(1, taps):
        copy(long_at(places + 8 * tap) + at, goal + (tap - 1) * window_stride + at, size)


@subroutine
def keep_parts(work: Any, inputs: int, save: int, window: int, parts: Any, places: int) -> None:
    """Write some channels of the window of a state that is stored. inputs: of the new rows; parts: the first channels
    of two parts, which may be the same, and how many each has.
    """
    row, slot = save_at(work.walk, save)
    goal, size = state_of(work.walk, slot) + work.state_at, work.width
    first, second, count = parts
    for part in range(1 if second == first else 2):
        keep_window(
            work.walk, row, work.tap_count, inputs, work.inputs_stride, work.row_at, window, goal,
            work.channels * size, (first if part == 0 else second) * size, count * size, places,
        )  # fmt: skip


@subroutine
def copy(source: int, place: int, size: int) -> None:
    """Copy bytes, a multiple of 8, as they are: converting a number to bfloat16 again may change a tiny one."""
    for at in range(0, size, 8):
        put_long(place + at, long_at(source + at))
