"""Kernels of matrix products: a thread multiplies all rows with its panels of the matrix. See `matmul`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from engine.model.amx import TILE_BYTES, TILE_ROWS, configure_tiles, release_tiles
from engine.model.exponential import exp
from engine.model.matmul_sums import PANELS, ROW_BYTES, STEP, TILES, new_room, sum_tiles, sum_vectors
from engine.model.quantised import tile_bytes, unpack_tiles
from engine.model.simd import (
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
from engine.model.team import kernel, member, members

AT_ONCE = 8
"""Rows whose sums of two panels fit into the vector registers."""
_TILE_4, _TILE_8 = tile_bytes(4), tile_bytes(8)

MATMUL = np.dtype(
    [
        (name, "i8")
        for name in (
            "x",  # [rows, inputs]
            "weights",  # [panels, steps, 16, 16, 2] bfloat16, [panels, steps, 32, 16] float32, or quantised tiles
            "bits",  # 4 or 8: of the codes of a quantised matrix; 0: it is not quantised
            "scratch",  # [threads, scratch_bytes], where panels of a quantised matrix are unpacked, or rows widened
            "scratch_bytes",
            "bias",  # [panels * 16] float32, or 0
            "out",  # [rows, outputs]; gated: [rows, outputs / 2]
            "width",  # bytes of a number of x and out, and of the matrix if it is not quantised
            "tiles",  # AMX: configuration for min(rows, 16) rows
            "rows",
            "inputs",  # a multiple of 32
            "outputs",
            "gated",  # 1: panels of gate and up alternate, and silu(gate) * up comes out
        )
    ]
)


@njit
def first_panel(work: Any, part: int, parts: int) -> Any:
    """Where a thread's panels begin. A gate and its up are never parted."""
    panels = (work.outputs + LANES - 1) // LANES
    return panels // 2 * part // parts * 2 if work.gated != 0 else panels * part // parts


@njit
def _panels_at(work: Any, panel: int, width: int, steps: int) -> Any:
    """The address of `width` panels of bfloat16."""
    place, first = work.scratch + member() * work.scratch_bytes, panel * steps
    if work.bits == 4:
        unpack_tiles(4, work.weights + first * _TILE_4, width * steps, place)
    elif work.bits == 8:
        unpack_tiles(8, work.weights + first * _TILE_8, width * steps, place)
    else:
        place = work.weights + first * TILE_BYTES
    return place


def _tile_sums(bits: int) -> Any:
    size = tile_bytes(bits) if bits else TILE_BYTES

    @njit
    def sums(tiles: int, width: int, x: int, last: int, stride: int, weights: int, steps: int, room: int) -> None:
        """Sums of up to four tiles of rows with one or two panels."""
        if tiles == 1 and width == 2:
            sum_tiles(1, 2, bits, x, last, stride, weights, steps, room)
        elif tiles == 1:
            sum_tiles(1, 1, bits, x, last, stride, weights, steps, room)
        elif tiles == 2 and width == 2:
            sum_tiles(2, 2, bits, x, last, stride, weights, steps, room)
        elif tiles == 2:
            sum_tiles(2, 1, bits, x, last, stride, weights, steps, room)
        else:
            for panel in range(width):
                at, place = weights + panel * steps * size, room + 64 * panel
                if tiles == 3:
                    sum_tiles(3, 1, bits, x, last, stride, at, steps, place)
                else:
                    sum_tiles(4, 1, bits, x, last, stride, at, steps, place)

    return sums


_sums, _sums_of_4, _sums_of_8 = _tile_sums(0), _tile_sums(4), _tile_sums(8)


@kernel(MATMUL)
def amx_kernel(address: Any) -> None:
    """Tiles are of min(rows, 16) rows each. The last ones may do rows again that others have done."""
    work = carray(address, 1)[0]
    panel, end = first_panel(work, member(), members()), first_panel(work, member() + 1, members())
    if panel == end:
        return
    steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
    size = min(work.rows, TILE_ROWS)
    once = work.rows <= TILES * TILE_ROWS
    coded = once and work.bits != 0  # then codes are unpacked on the way
    tiles = (work.rows + TILE_ROWS - 1) // TILE_ROWS if once else 2
    last = min(work.rows, tiles * TILE_ROWS) - size  # where the last tile of some begins
    configure_tiles(work.tiles)
    while panel < end:
        width, first = min(end - panel, PANELS), panel * steps
        weights = 0 if coded else _panels_at(work, panel, width, steps)
        for row in range(0, work.rows, tiles * TILE_ROWS):
            row = min(row, work.rows - last - size)
            x = work.x + row * stride
            if coded and work.bits == 4:
                _sums_of_4(tiles, width, x, last * stride, stride, work.weights + first * _TILE_4, steps, room)
            elif coded:
                _sums_of_8(tiles, width, x, last * stride, stride, work.weights + first * _TILE_8, steps, room)
            else:
                _sums(tiles, width, x, last * stride, stride, weights, steps, room)
            for tile in range(tiles):
                at = last if tile == tiles - 1 else tile * TILE_ROWS
                put_sums(work, row + at, size, panel, width, room + tile * TILE_ROWS * ROW_BYTES)
        panel += width
    release_tiles()


def _vector_sums(bits: int, keep: int) -> Any:
    @njit
    def sums(rows: int, width: int, x: int, stride: int, weights: int, steps: int, room: int, place: int) -> None:
        """Sums of up to AT_ONCE rows with one or two panels."""
        if width == 1:
            sum_vectors(8, 1, bits, keep, rows, x, stride, weights, steps, room, ROW_BYTES, place)
        elif rows == 1:
            sum_vectors(1, 2, bits, keep, rows, x, stride, weights, steps, room, ROW_BYTES, place)
        elif rows <= 4:
            sum_vectors(4, 2, bits, keep, rows, x, stride, weights, steps, room, ROW_BYTES, place)
        else:
            sum_vectors(8, 2, bits, keep, rows, x, stride, weights, steps, room, ROW_BYTES, place)

    return sums


_vectors, _vectors_of_4, _vectors_of_8 = (_vector_sums(bits, 0) for bits in (0, 4, 8))
_keep_4, _keep_8 = (_vector_sums(bits, 1) for bits in (4, 8))


@kernel(MATMUL)
def vector_kernel(address: Any) -> None:
    """The first rows are multiplied while codes are unpacked, others with what comes of it."""
    work = carray(address, 1)[0]
    panel, end = first_panel(work, member(), members()), first_panel(work, member() + 1, members())
    steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
    place, once = work.scratch + member() * work.scratch_bytes, work.rows <= AT_ONCE
    while panel < end:
        width, first = min(end - panel, PANELS), panel * steps
        for row in range(0, work.rows, AT_ONCE):
            rows, x = min(AT_ONCE, work.rows - row), work.x + row * stride
            if work.bits == 0:
                _vectors(rows, width, x, stride, work.weights + first * TILE_BYTES, steps, room, place)
            elif row != 0:
                _vectors(rows, width, x, stride, place, steps, room, place)
            elif work.bits == 4 and once:
                _vectors_of_4(rows, width, x, stride, work.weights + first * _TILE_4, steps, room, place)
            elif work.bits == 4:
                _keep_4(rows, width, x, stride, work.weights + first * _TILE_4, steps, room, place)
            elif once:
                _vectors_of_8(rows, width, x, stride, work.weights + first * _TILE_8, steps, room, place)
            else:
                _keep_8(rows, width, x, stride, work.weights + first * _TILE_8, steps, room, place)
            put_sums(work, row, rows, panel, width, room)
        panel += width


@njit
def put_sums(work: Any, first: int, rows: int, panel: int, width: int, room: int) -> None:
    """The sums in `room`, [rows, 2 * 16], plus the bias, to the output."""
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
