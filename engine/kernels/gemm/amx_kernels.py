"""Products in AMX tiles: sixteen rows with one or two panels at a time. See `matmul`."""

from __future__ import annotations

from typing import Any

from numba import carray, literally

from engine.kernels.amx import LINE_BYTES, TILE_BYTES, TILE_ROWS, configure_tiles, release_tiles
from engine.kernels.gemm.matmul_kernels import PartKernel, own_panels, part_kernel, put_sums
from engine.kernels.gemm.matmul_sums import PANELS, ROW_BYTES, TILES, add_tiles, new_scratch, sum_tiles
from engine.kernels.quant.layouts import STEP, QuantLayout
from engine.kernels.quant.unpack import tile_offset, unpack_steps
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import thread_id

BLOCK_STEPS = 8
"""Steps of a block of inputs, if there are more rows than fit into tiles: whole tiles of every layout."""
UNPACKED_BYTES = PANELS * BLOCK_STEPS * TILE_BYTES
"""Bytes of a block of panels, unpacked: half of the first level of cache holds them."""
KEPT_PANELS, KEPT_BYTES = 16, 1 << 19
"""Panels whose sums are kept between blocks of inputs, and the bytes that these may have in the second level."""
SLICE_TILES = 32
"""Tiles of rows that share a block of inputs: of more rows, a block and its sums leave the second level of cache."""


@subroutine
def unpack_block(
    layout: int, weights: int, panel_bytes: int, step: int, count: int, width: int, place: int, later: int
) -> tuple[int, int]:
    """Unpack `count` steps of `width` panels from `step` on, the first of a tile, at `place`, and prefetch what is
    `later` bytes after them. Return where they are as bfloat16, and how far the panels are apart there. layout: its
    number, a constant.
    """
    layout = literally(layout)
    at = weights + tile_offset(layout, step)
    if layout == 0:
        return at, panel_bytes
    for i in range(width):
        coded = at + i * panel_bytes
        unpack_steps(layout, coded, count, place + i * BLOCK_STEPS * TILE_BYTES, coded + later)
    return place, BLOCK_STEPS * TILE_BYTES


@subroutine
def _tile_sums(
    layout: int,
    tiles: int,
    width: int,
    x: int,
    last: int,
    stride: int,
    weights: int,
    steps: int,
    panel_bytes: int,
    scratch: int,
) -> None:
    """Compute products of up to four tiles of rows with one or two panels. layout: its number, a constant."""
    layout = literally(layout)
    if tiles == 1 and width == 2:
        sum_tiles(1, 2, layout, x, last, stride, weights, steps, scratch)
    elif tiles == 1:
        sum_tiles(1, 1, layout, x, last, stride, weights, steps, scratch)
    elif tiles == 2 and width == 2:
        sum_tiles(2, 2, layout, x, last, stride, weights, steps, scratch)
    elif tiles == 2:
        sum_tiles(2, 1, layout, x, last, stride, weights, steps, scratch)
    else:
        for panel in range(width):
            at, place = weights + panel * panel_bytes, scratch + 64 * panel
            if tiles == 3:
                sum_tiles(3, 1, layout, x, last, stride, at, steps, place)
            else:
                sum_tiles(4, 1, layout, x, last, stride, at, steps, place)


def amx_kernel(layout: QuantLayout) -> PartKernel:
    """Return the AMX kernel for matrices of that layout. A tile has min(rows, 16) rows, and the last may repeat rows of
    others. Codes of up to four tiles of rows are unpacked during the product.
    """
    number = layout.number

    @part_kernel(layout.kind)
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        panel, end = own_panels(work, part)
        if panel == end:
            return
        configure_tiles(work.tiles)
        if work.rows > TILES * TILE_ROWS:
            _multiply_blocks(number, work, part, panel, end)
        else:
            _multiply_panels(number, work, part, panel, end)
        release_tiles()

    return compiled


@subroutine
def _multiply_panels(layout: int, work: Any, part: Any, panel: int, end: int) -> None:
    """Multiply up to four tiles of rows with the panels, one or two at a time. layout: its number, a constant."""
    layout = literally(layout)
    steps, stride, scratch = work.inputs // STEP, work.inputs * 2, new_scratch()
    most, tiles = min(work.rows, TILE_ROWS), (work.rows + TILE_ROWS - 1) // TILE_ROWS
    last = work.rows - most  # where the last tile begins
    while panel < end:
        width = min(end - panel, PANELS)
        weights = part.weights + panel * part.panel_bytes
        _tile_sums(layout, tiles, width, work.x, last * stride, stride, weights, steps, part.panel_bytes, scratch)
        for tile in range(tiles):
            begin = last if tile == tiles - 1 else tile * TILE_ROWS
            sums = scratch + tile * TILE_ROWS * ROW_BYTES
            put_sums(work, begin, most, part.first + panel, width, sums, ROW_BYTES, LINE_BYTES)
        panel += width


@subroutine
def _multiply_blocks(layout: int, work: Any, part: Any, panel: int, end: int) -> None:
    """Multiply all rows with the panels, in equal slices of at most SLICE_TILES tiles. layout: its number, a
    constant.
    """
    layout = literally(layout)
    tiles = (work.rows + TILE_ROWS - 1) // TILE_ROWS
    slices = (tiles + SLICE_TILES - 1) // SLICE_TILES
    for i in range(slices):
        _multiply_slice(layout, work, part, panel, end, tiles * i // slices, tiles * (i + 1) // slices)


@subroutine
def _multiply_slice(layout: int, work: Any, part: Any, panel: int, end: int, first: int, stop: int) -> None:
    """Multiply the tiles of rows from first to stop with the panels, in blocks of inputs, whose rows and weights stay
    in the caches. The sums of some panels are kept between blocks. The last tile may repeat rows, so there are sums for
    each tile, not each row. layout: its number, a constant.
    """
    layout = literally(layout)
    steps, apart = work.inputs // STEP, (stop - first) * TILE_BYTES
    together = panels_kept(stop - first)
    unpacked = work.scratch + thread_id() * work.scratch_bytes
    sums = unpacked + UNPACKED_BYTES
    while panel < end:
        width = min(end - panel, together)
        for step in range(0, steps, BLOCK_STEPS):
            count = min(BLOCK_STEPS, steps - step)
            later = tile_offset(layout, BLOCK_STEPS)  # the next block, after the last one that of the next panels
            if step + BLOCK_STEPS >= steps:
                later = width * part.panel_bytes - tile_offset(layout, step)
            for i in range(0, width, PANELS):
                weights = part.weights + (panel + i) * part.panel_bytes
                some, place = min(PANELS, width - i), sums + i * apart
                here, between = unpack_block(layout, weights, part.panel_bytes, step, count, some, unpacked, later)
                _add_block(work, first, stop, step, count, some, here, between, place)
        for tile in range(first, stop):
            place = sums + (tile - first) * TILE_BYTES
            put_sums(work, _begin(work, tile), TILE_ROWS, part.first + panel, width, place, LINE_BYTES, apart)
        panel += width


@subroutine
def _begin(work: Any, tile: int) -> Any:
    """Return the first row of a tile."""
    return min(tile * TILE_ROWS, work.rows - TILE_ROWS)


@subroutine
def _add_block(
    work: Any, first: int, stop: int, step: int, count: int, width: int, weights: int, between: int, sums: int
) -> None:
    """Add the products of `count` steps of the tiles of rows from first to stop, from `step` on, with one or two
    unpacked panels, `between` bytes apart.
    """
    stride, apart = work.inputs * 2, (stop - first) * TILE_BYTES
    fresh, x = int(step == 0), work.x + step * STEP * 2
    for tile in range(first, stop, 2):
        begin = _begin(work, tile)
        last = (_begin(work, tile + 1) - begin) * stride
        at, place = x + begin * stride, sums + (tile - first) * TILE_BYTES
        if tile + 1 < stop and width == 2:
            add_tiles(2, 2, fresh, at, last, stride, weights, between, count, place, apart)
        elif tile + 1 < stop:
            add_tiles(2, 1, fresh, at, last, stride, weights, between, count, place, apart)
        elif width == 2:
            add_tiles(1, 2, fresh, at, 0, stride, weights, between, count, place, apart)
        else:
            add_tiles(1, 1, fresh, at, 0, stride, weights, between, count, place, apart)


@subroutine
def panels_kept(tiles: int) -> int:
    """Return how many panels' sums with so many tiles of rows are kept between blocks of inputs: an even number."""
    return max(PANELS, min(KEPT_PANELS, KEPT_BYTES // (tiles * TILE_BYTES) // PANELS * PANELS))


def block_bytes(rows: int) -> int:
    """Scratch that a thread needs for `rows` rows or fewer: a block of panels, and sums."""
    tiles = min(-(-rows // TILE_ROWS), SLICE_TILES)
    if tiles <= TILES:
        return 0
    return UNPACKED_BYTES + max(min(KEPT_PANELS * tiles * TILE_BYTES, KEPT_BYTES), PANELS * tiles * TILE_BYTES)
