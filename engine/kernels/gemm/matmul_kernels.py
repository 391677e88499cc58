"""Kernels of matrix products: a thread multiplies all rows with its panels of the matrix. See `matmul`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, literally, njit, types
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, TILE_BYTES, TILE_ROWS, configure_tiles, release_tiles
from engine.kernels.exponential import exp
from engine.kernels.gemm.code_sums import put_totals, sum_codes
from engine.kernels.gemm.matmul_sums import PANELS, ROW_BYTES, TILES, add_tiles, new_room, sum_tiles, sum_vectors
from engine.kernels.jit_cache import versioned
from engine.kernels.quant.layouts import STEP, QuantLayout
from engine.kernels.quant.unpack import tile_offset, unpack_steps
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    divide,
    float_at,
    load,
    multiply,
    pointer,
    put_number,
    put_numbers,
    splat,
    store,
)
from engine.kernels.threads import barrier, kernel, num_threads, thread_id

AT_ONCE = 8
"""Rows whose sums of two panels fit into the vector registers."""

_FEW = 4
"""Rows below which a product takes as long as reading the matrix."""
CODE_ROWS = 8
"""Rows whose products with a group's codes in two panels fit into the vector registers."""
BLOCK_STEPS = 8
"""Steps of a block of inputs, if there are more rows than fit into tiles: whole tiles of every layout."""
UNPACKED_BYTES = PANELS * BLOCK_STEPS * TILE_BYTES
"""Bytes of a block of panels, unpacked: half of the first level of cache holds them."""
KEPT_PANELS, KEPT_BYTES = 16, 1 << 19
"""Panels whose sums are kept between blocks of inputs, and the bytes that these may have in the second level."""
SLICE_TILES = 32
"""Tiles of rows that share a block of inputs: of more rows, a block and its sums leave the second level of cache."""
OWN_TOTALS = 1 << 10
"""Bytes of groups' totals up to which each thread computes them all for itself, which takes no longer than waiting."""

MATMUL = np.dtype(
    [
        (name, "i8")
        for name in (
            "rows",
            "tiles",  # AMX: configuration for min(rows, 16) rows
            "x",  # [rows, inputs]
            "parts",  # [count] PART
            "count",
            "scratch",  # [shared_bytes] for all threads, then [threads, scratch_bytes]: where codes are unpacked, or
            "shared_bytes",  # rows widened or rounded. Then gates
            "scratch_bytes",
            "bias",  # [panels * 16] float32, or 0
            "out",  # [rows, outputs]; gated: [rows, outputs / 2]
            "width",  # bytes of a number of x and out
            "inputs",  # a multiple of 32
            "outputs",
            "gated",  # 1: panels of gate and up alternate, and the result is silu(gate) * up
            "gate_bytes",  # gated, but the whole gate is a part, and up the next: of [rows, outputs / 2] float32, or 0
        )
    ]
)
PART = np.dtype(
    [
        (name, "i8")
        for name in (
            "kernel",  # address of the function that multiplies it
            "number_sums",  # without AMX: address of the function that multiplies panels of numbers
            "weights",  # [panels, panel_bytes]: tiles of `engine.kernels.quant.layouts`, or [steps, 32, 16] float32
            "panel_bytes",
            "first",  # of all panels of the product
            "panels",
        )
    ]
)
"""Neighbouring panels of a matrix that have one layout."""
_PART_BYTES = PART.itemsize


class PartKernel:
    """A compiled function of a MATMUL record and of one of its parts."""

    def __init__(self, compiled: Any):
        self._compiled = compiled  # its code is freed with it
        self.address: int = compiled.address


def part_kernel(name: str) -> Callable[[Callable[[Any, Any], None]], PartKernel]:
    """Decorator: `work(address of a MATMUL record, address of a PART)`, compiled now and cached on disk. name: of one
    of several that one function makes.
    """

    def decorate(work: Callable[[Any, Any], None]) -> PartKernel:
        work.__qualname__ += name
        records = (types.CPointer(numba.from_dtype(record)) for record in (MATMUL, PART))
        return PartKernel(cfunc(types.void(*records), cache=True)(versioned(work)))

    return decorate


@intrinsic
def _multiply(context: Any, work: Any, part: Any) -> Any:
    """Call the kernel of the PART at that address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        record = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [record, record])
        word = ir.IntType(64)
        function = builder.inttoptr(builder.load(pointer(builder, args[1], word)), kind.as_pointer())
        builder.call(function, [builder.bitcast(args[0], record), builder.inttoptr(args[1], record)])
        return context.get_dummy_value()

    return types.void(work, types.int64), generate


@kernel(MATMUL)
def product_kernel(address: Any) -> None:
    """Multiply all parts, one after the other."""
    work = carray(address, 1)[0]
    for i in range(work.count):
        _multiply(address, work.parts + i * _PART_BYTES)


@njit
def own_panels(work: Any, part: Any) -> Any:
    """Return where this thread's panels of a part begin and end. A gate panel and its up panel are never separated."""
    together = 2 if work.gated != 0 and work.gate_bytes == 0 else 1
    first = 0 if work.gate_bytes != 0 else part.first // together
    begin, end = share_of(part.panels // together, first, thread_id(), num_threads())
    return begin * together, end * together


@njit
def share_of(units: int, before: int, thread: int, threads: int) -> tuple[int, int]:
    """Where a thread's share of a part's units begins and ends. before: the units of the parts before it. Where these
    left some threads one unit less than others, the next units that are over go to them: of all parts together, no
    thread has more than one unit more than another.
    """
    least, over = units // threads, units % threads
    first = before % threads  # of the threads that have one more; they go on from thread 0 after the last

    def more(below: int) -> int:
        return min(max(below - first, 0), over) + min(below, max(first + over - threads, 0))

    return thread * least + more(thread), (thread + 1) * least + more(thread + 1)


@njit
def unpack_panels(layout: int, work: Any, weights: int, panel_bytes: int, width: int, place: int) -> int:
    """Unpack `width` panels as bfloat16 at `place`, which is returned. layout: its number, a constant."""
    layout = literally(layout)
    steps = work.inputs // STEP
    for i in range(width):
        at = weights + i * panel_bytes
        unpack_steps(layout, at, steps, place + i * steps * TILE_BYTES, at + panel_bytes)
    return place


@njit
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


@njit
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
    room: int,
) -> None:
    """Compute products of up to four tiles of rows with one or two panels. layout: its number, a constant."""
    layout = literally(layout)
    if tiles == 1 and width == 2:
        sum_tiles(1, 2, layout, x, last, stride, weights, steps, room)
    elif tiles == 1:
        sum_tiles(1, 1, layout, x, last, stride, weights, steps, room)
    elif tiles == 2 and width == 2:
        sum_tiles(2, 2, layout, x, last, stride, weights, steps, room)
    elif tiles == 2:
        sum_tiles(2, 1, layout, x, last, stride, weights, steps, room)
    else:
        for panel in range(width):
            at, place = weights + panel * panel_bytes, room + 64 * panel
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


@njit
def _multiply_panels(layout: int, work: Any, part: Any, panel: int, end: int) -> None:
    """Multiply up to four tiles of rows with the panels, one or two at a time. layout: its number, a constant."""
    layout = literally(layout)
    steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
    most, tiles = min(work.rows, TILE_ROWS), (work.rows + TILE_ROWS - 1) // TILE_ROWS
    last = work.rows - most  # where the last tile begins
    while panel < end:
        width = min(end - panel, PANELS)
        weights = part.weights + panel * part.panel_bytes
        _tile_sums(layout, tiles, width, work.x, last * stride, stride, weights, steps, part.panel_bytes, room)
        for tile in range(tiles):
            begin = last if tile == tiles - 1 else tile * TILE_ROWS
            sums = room + tile * TILE_ROWS * ROW_BYTES
            put_sums(work, begin, most, part.first + panel, width, sums, ROW_BYTES, LINE_BYTES)
        panel += width


@njit
def _multiply_blocks(layout: int, work: Any, part: Any, panel: int, end: int) -> None:
    """Multiply all rows with the panels, in equal slices of at most SLICE_TILES tiles. layout: its number, a
    constant.
    """
    layout = literally(layout)
    tiles = (work.rows + TILE_ROWS - 1) // TILE_ROWS
    slices = (tiles + SLICE_TILES - 1) // SLICE_TILES
    for i in range(slices):
        _multiply_slice(layout, work, part, panel, end, tiles * i // slices, tiles * (i + 1) // slices)


@njit
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


@njit
def _begin(work: Any, tile: int) -> Any:
    """Return the first row of a tile."""
    return min(tile * TILE_ROWS, work.rows - TILE_ROWS)


@njit
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


@njit
def panels_kept(tiles: int) -> int:
    """Return how many panels' sums with so many tiles of rows are kept between blocks of inputs: an even number."""
    return max(PANELS, min(KEPT_PANELS, KEPT_BYTES // (tiles * TILE_BYTES) // PANELS * PANELS))


def block_bytes(rows: int) -> int:
    """Scratch that a thread needs for `rows` rows or fewer: a block of panels, and sums."""
    tiles = min(-(-rows // TILE_ROWS), SLICE_TILES)
    if tiles <= TILES:
        return 0
    return UNPACKED_BYTES + max(min(KEPT_PANELS * tiles * TILE_BYTES, KEPT_BYTES), PANELS * tiles * TILE_BYTES)


@cache
def number_sums() -> Any:
    """Return the compiled function `multiply`."""

    def multiply(rows: int, x: int, stride: int, weights: int, panel_bytes: int, steps: int, room: int) -> None:
        """Compute products of up to AT_ONCE rows with two panels of bfloat16."""
        sum_vectors(1, AT_ONCE, 2, rows, x, stride, weights, panel_bytes, steps, room, ROW_BYTES)

    return cfunc(types.void(*[types.int64] * 7), cache=True)(versioned(multiply))


def vector_kernel(layout: QuantLayout) -> PartKernel:
    """Return the vector kernel for matrices of that layout. The last of an odd number of panels is multiplied twice, so
    that there is code for two alone.
    """
    return _codes_kernel(layout) if layout.coded else _numbers_kernel(layout)


def _numbers_kernel(layout: QuantLayout) -> PartKernel:
    @part_kernel(layout.kind)
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        panel, end = own_panels(work, part)
        steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
        while panel < end:
            width, weights = min(end - panel, PANELS), part.weights + panel * part.panel_bytes
            apart = part.panel_bytes if width == PANELS else 0
            row = 0
            while row < work.rows:
                rows, x = rows_at_once(work.rows - row), work.x + row * stride
                call_sums(part.number_sums, rows, x, stride, weights, apart, steps, room)
                put_sums(work, row, rows, part.first + panel, width, room, ROW_BYTES, LINE_BYTES)
                row += rows
            panel += width

    return compiled


def _codes_kernel(layout: QuantLayout) -> PartKernel:
    """Looking codes up again for further rows is faster than to keep what was found."""
    number, offsets, size = layout.number, layout.offset is not None, layout.group

    @part_kernel(f"{layout.kind}_words")
    def compiled(address: Any, at: Any) -> None:
        work, part = carray(address, 1)[0], carray(at, 1)[0]
        panel, end = own_panels(work, part)
        steps, stride, room = work.inputs // STEP, work.inputs * 2, new_room()
        groups = work.inputs // size
        own = work.rows * groups * 4 <= OWN_TOTALS
        totals = work.scratch + (work.shared_bytes + thread_id() * work.scratch_bytes if own else 0)
        if offsets and own:
            put_totals(size, work.x, work.rows, groups, totals, 0, 1)
        elif offsets:
            if part.first != 0:
                barrier()  # other threads may still read the totals of the part before, whose groups may be larger
            put_totals(size, work.x, work.rows, groups, totals, thread_id(), num_threads())
            barrier()
        while panel < end:
            width, weights = min(end - panel, PANELS), part.weights + panel * part.panel_bytes
            apart = part.panel_bytes if width == PANELS else 0
            row = 0
            while row < work.rows:
                rows, x, of_rows = code_rows_at_once(work.rows - row), work.x + row * stride, totals + row * groups * 4
                sum_codes(number, CODE_ROWS, rows, x, stride, of_rows, weights, apart, steps, room, ROW_BYTES)
                put_sums(work, row, rows, part.first + panel, width, room, ROW_BYTES, LINE_BYTES)
                row += rows
            panel += width

    return compiled


@intrinsic
def call_sums(
    context: Any, function: Any, rows: Any, x: Any, stride: Any, weights: Any, panels: Any, steps: Any, room: Any
) -> Any:
    """Call the function of a PART's `number_sums`, which is compiled once for all layouts. panels: how far apart two
    panels are, or how many there are, as it wants.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@njit
def rows_at_once(left: int) -> int:
    """Return how many of the rows that are left to multiply next. The last group has at least `_FEW`: fewer take as
    long.
    """
    return left if left <= AT_ONCE else min(AT_ONCE, left - _FEW)


@njit
def code_rows_at_once(left: int) -> int:
    """Return the same for rows of a product with codes. The last group is not small, since codes are looked up for
    each.
    """
    return left if left <= CODE_ROWS else min(CODE_ROWS, left - CODE_ROWS // 4)


@njit
def put_sums(work: Any, first: int, rows: int, panel: int, width: int, room: int, row_bytes: int, apart: int) -> None:
    """Write the sums in `room` plus the bias to the output. A row's 16 sums with a panel are `row_bytes` after those of
    the row before, and `apart` bytes after those with the panel before.
    """
    for row in range(first, first + rows):
        for i in range(width):
            column, sums = (panel + i) * LANES, room + i * apart
            x = _biased(work, sums, column)
            if work.gate_bytes != 0:
                _put_in_turn(work, x, row, column)
            elif work.gated != 0:
                if i % 2 == 0:
                    x = multiply(_swish(x), _biased(work, sums + apart, column + LANES))
                    put_numbers(x, work.out + (row * work.outputs + column) // 2 * work.width, work.width)
            elif column + LANES <= work.outputs:
                put_numbers(x, work.out + (row * work.outputs + column) * work.width, work.width)
            else:
                store(x, sums, FLOAT32)
                for lane in range(work.outputs - column):
                    place = work.out + (row * work.outputs + column + lane) * work.width
                    put_number(place, float_at(sums + 4 * lane), work.width)
        room += row_bytes


@njit
def _put_in_turn(work: Any, x: Any, row: int, column: int) -> None:
    """Keep a row's sums with a panel of the gate, or write those with a panel of up, by the thread that kept those of
    the gate.
    """
    half = work.outputs // 2
    place = row * half + column % half
    gate = work.scratch + work.shared_bytes + num_threads() * work.scratch_bytes + 4 * place
    if column < half:
        store(x, gate, FLOAT32)
    else:
        put_numbers(multiply(_swish(load(gate, FLOAT32)), x), work.out + place * work.width, work.width)


@njit
def _swish(x: Any) -> Any:
    return divide(x, add(splat(np.float32(1)), exp(multiply(x, splat(np.float32(-1))))))


@njit
def _biased(work: Any, sums: int, column: int) -> Any:
    x = load(sums, FLOAT32)
    if work.bias != 0:
        x = add(x, load(work.bias + 4 * column, FLOAT32))
    return x
