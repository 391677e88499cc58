"""Kernels of matrix products: a thread multiplies all rows with its panels of the matrix. See `matmul`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, literally, njit

from engine.kernels.amx import TILE_BYTES, TILE_ROWS, configure_tiles, release_tiles
from engine.kernels.exponential import exp
from engine.kernels.gemm.matmul_sums import PANELS, ROW_BYTES, STEP, TILES, new_room, sum_tiles, sum_vectors
from engine.kernels.quantised import Form, unpack_tiles
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    divide,
    float_at,
    load,
    multiply,
    put_number,
    put_numbers,
    splat,
    store,
)
from engine.kernels.threads import Kernel, kernel, member, members

AT_ONCE = 8
"""Rows whose sums of two panels fit into the vector registers."""

_FEW = 4
"""Rows below which a product with kept panels takes as long as reading them."""

MATMUL = np.dtype(
    [
        (name, "i8")
        for name in (
            "rows",
            "tiles",  # AMX: configuration for min(rows, 16) rows
            "x",  # [rows, inputs]
            "weights",  # [panels, steps, 16, 16, 2] bfloat16, [panels, steps, 32, 16] float32, or quantised tiles
            "scratch",  # [shared_bytes] for all threads, then [threads, scratch_bytes]: where panels of a quantised
            "shared_bytes",  # matrix are unpacked, or rows widened or rounded
            "scratch_bytes",
            "bias",  # [panels * 16] float32, or 0
            "out",  # [rows, outputs]; gated: [rows, outputs / 2]
            "width",  # bytes of a number of x and out, and of the matrix if it is not quantised
            "inputs",  # a multiple of 32
            "outputs",
            "gated",  # 1: panels of gate and up alternate, and the result is silu(gate) * up
        )
    ]
)


@njit
def first_panel(work: Any, part: int, parts: int) -> Any:
    """Where a thread's panels begin. A gate panel and its up panel are never separated."""
    panels = (work.outputs + LANES - 1) // LANES
    return panels // 2 * part // parts * 2 if work.gated != 0 else panels * part // parts


@njit
def _panels_at(form: int, work: Any, panel: int, width: int, steps: int, size: int) -> Any:
    """The address of `width` panels of bfloat16. form: a constant; size: bytes of its tiles."""
    form = literally(form)
    if form == 0:
        return work.weights + panel * steps * size
    place = work.scratch + member() * work.scratch_bytes
    unpack_tiles(form, work.weights + panel * steps * size, width * steps, place)
    return place


@njit
def _tile_sums(
    form: int,
    tiles: int,
    width: int,
    x: int,
    last: int,
    stride: int,
    weights: int,
    steps: int,
    size: int,
    room: int,
) -> None:
    """Products of up to four tiles of rows with one or two panels. form: a constant; size: bytes of its tiles."""
    form = literally(form)
    if tiles == 1 and width == 2:
        sum_tiles(1, 2, form, x, last, stride, weights, steps, room)
    elif tiles == 1:
        sum_tiles(1, 1, form, x, last, stride, weights, steps, room)
    elif tiles == 2 and width == 2:
        sum_tiles(2, 2, form, x, last, stride, weights, steps, room)
    elif tiles == 2:
        sum_tiles(2, 1, form, x, last, stride, weights, steps, room)
    else:
        for panel in range(width):
            at, place = weights + panel * steps * size, room + 64 * panel
            if tiles == 3:
                sum_tiles(3, 1, form, x, last, stride, at, steps, place)
            else:
                sum_tiles(4, 1, form, x, last, stride, at, steps, place)


def amx_kernel(form: Form) -> Kernel:
    """The AMX kernel for matrices of that form. A tile has min(rows, 16) rows, and the last may repeat rows of others.
    For up to four tiles of rows, codes are unpacked during the product; for more, before it.
    """
    number, size = int(form), form.tile_bytes

    @kernel(MATMUL, form.name)
    def compiled(address: Any) -> None:
        work = carray(address, 1)[0]
        panel, end = first_panel(work, member(), members()), first_panel(work, member() + 1, members())
        if panel == end:
            return
        steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
        most = min(work.rows, TILE_ROWS)
        once = work.rows <= TILES * TILE_ROWS
        tiles = (work.rows + TILE_ROWS - 1) // TILE_ROWS if once else 2
        last = min(work.rows, tiles * TILE_ROWS) - most  # where the last tile of a group begins
        configure_tiles(work.tiles)
        while panel < end:
            width = min(end - panel, PANELS)
            weights = work.weights + panel * steps * size
            if not once:
                weights = _panels_at(number, work, panel, width, steps, size)
            for row in range(0, work.rows, tiles * TILE_ROWS):
                row = min(row, work.rows - last - most)
                x = work.x + row * stride
                if once:
                    _tile_sums(number, tiles, width, x, last * stride, stride, weights, steps, size, room)
                else:
                    _tile_sums(0, tiles, width, x, last * stride, stride, weights, steps, TILE_BYTES, room)
                for tile in range(tiles):
                    at = last if tile == tiles - 1 else tile * TILE_ROWS
                    put_sums(work, row + at, most, panel, width, room + tile * TILE_ROWS * ROW_BYTES)
            panel += width
        release_tiles()

    return compiled()


@njit
def _vector_sums(
    form: int,
    keep: int,
    rows: int,
    width: int,
    x: int,
    stride: int,
    weights: int,
    steps: int,
    room: int,
    place: int,
) -> None:
    """Products of up to AT_ONCE rows with one or two panels. form, keep: constants."""
    form, keep = literally(form), literally(keep)
    if width == 1:
        sum_vectors(AT_ONCE, 1, form, keep, rows, x, stride, weights, steps, room, ROW_BYTES, place)
    else:
        sum_vectors(AT_ONCE, 2, form, keep, rows, x, stride, weights, steps, room, ROW_BYTES, place)


def vector_kernel(form: Form) -> Kernel:
    """The vector kernel for matrices of that form. The first rows' product unpacks the codes; later rows reuse them."""
    number, size, coded = int(form), form.tile_bytes, form is not Form.BFLOAT16
    kept = int(coded)

    @kernel(MATMUL, form.name)
    def compiled(address: Any) -> None:
        work = carray(address, 1)[0]
        panel, end = first_panel(work, member(), members()), first_panel(work, member() + 1, members())
        steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
        place, once = work.scratch + member() * work.scratch_bytes, work.rows <= AT_ONCE
        while panel < end:
            width, weights = min(end - panel, PANELS), work.weights + panel * steps * size
            row = 0
            while row < work.rows:
                rows, x = rows_at_once(work.rows - row), work.x + row * stride
                if coded and row != 0:
                    _vector_sums(0, 0, rows, width, x, stride, place, steps, room, place)
                elif once:
                    _vector_sums(number, 0, rows, width, x, stride, weights, steps, room, place)
                else:
                    _vector_sums(number, kept, rows, width, x, stride, weights, steps, room, place)
                put_sums(work, row, rows, panel, width, room)
                row += rows
            panel += width

    return compiled()


@njit
def rows_at_once(left: int) -> int:
    """How many of the rows that are left to multiply next. The last group has at least `_FEW`: fewer take as long,
    since reading the kept panels does.
    """
    return left if left <= AT_ONCE else min(AT_ONCE, left - _FEW)


@njit
def put_sums(work: Any, first: int, rows: int, panel: int, width: int, room: int) -> None:
    """Write the sums in `room`, [rows, 2 * 16], plus the bias, to the output."""
    for row in range(first, first + rows):
        for i in range(width):
            column = (panel + i) * LANES
            x = _biased(work, room + i * 64, column)
            if work.gated != 0:
                if i == 0:
                    swish = divide(x, add(splat(np.float32(1)), exp(multiply(x, splat(np.float32(-1))))))
                    x = multiply(swish, _biased(work, room + 64, column + LANES))
                    put_numbers(x, work.out + (row * work.outputs + column) // 2 * work.width, work.width)
            elif column + LANES <= work.outputs:
                put_numbers(x, work.out + (row * work.outputs + column) * work.width, work.width)
            else:
                store(x, room + i * 64, FLOAT32)
                for lane in range(work.outputs - column):
                    place = work.out + (row * work.outputs + column + lane) * work.width
                    put_number(place, float_at(room + i * 64 + 4 * lane), work.width)
        room += ROW_BYTES


@njit
def _biased(work: Any, sums: int, column: int) -> Any:
    x = load(sums, FLOAT32)
    if work.bias != 0:
        x = add(x, load(work.bias + 4 * column, FLOAT32))
    return x
