"""The sums of a matrix product, for as many rows and panels as fit into a processor's registers: see `matmul`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.amx import LINE_BYTES, TILE_BYTES, TILE_ROWS, call, fetch_line, fetch_panel_line
from engine.kernels.quant.layouts import LAYOUTS, STEP, QuantLayout
from engine.kernels.quant.unpack import TileHead, open_tile, place_of, unpack_pairs
from engine.kernels.simd import LANES, pointer

PANELS = 2  # multiplied at once
TILES = 4  # of rows, multiplied at once
ROW_BYTES = 64 * PANELS  # of a row of sums
BUFFER = TILES * TILE_ROWS * ROW_BYTES  # its offset in a thread's scratch, after the sums
_AHEAD = 8  # steps by which tiles are prefetched ahead
_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
SUMS, _PAIRS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)


@intrinsic(prefer_literal=True)
def new_scratch(context: Any) -> Any:
    """Return the address of scratch for the sums of four tiles of rows with two panels, then for two tiles of each
    panel. It is valid until the caller returns.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # numba's own function would store zeros, which takes LLVM ten seconds
            scratch = builder.alloca(ir.ArrayType(_BYTE, BUFFER + 2 * PANELS * TILE_BYTES))
        scratch.align = 64
        return builder.ptrtoint(scratch, _WORD)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def sum_tiles(
    context: Any,
    tiles: Any,
    panels: Any,
    layout: Any,
    x: Any,
    last: Any,
    stride: Any,
    weights: Any,
    steps: Any,
    scratch: Any,
) -> Any:
    """Write products of `tiles` tiles of rows with `panels` panels, at most four pairs, to `scratch`: [tiles * 16, 2 *
    16] float32.

    tiles, panels, layout: compile-time constants, the last a layout's number. x: address of the first row, one every
    `stride` bytes; the last tile's rows begin `last` bytes further. weights: address of the first panel, of that
    layout. A step's codes are unpacked while the previous step is multiplied.
    """
    count, width, of = tiles.literal_value, panels.literal_value, LAYOUTS[layout.literal_value]
    sums = [[_BYTE(tile * width + panel) for panel in range(width)] for tile in range(count)]
    rows, matrix = [_BYTE(4), _BYTE(5)], [_BYTE(6), _BYTE(7)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, last, stride, weights, steps, scratch = args[3:]
        panel_bytes = builder.mul(builder.udiv(steps, _WORD(of.steps)), _WORD(of.tile_bytes))
        starts = [builder.add(weights, builder.mul(panel_bytes, _WORD(panel))) for panel in range(width)]
        next_panels = builder.mul(panel_bytes, _WORD(width))

        def tiles_of(step: ir.Value) -> list[ir.Value]:
            """Return where the bfloat16 tiles of a step's panels are, or will be unpacked."""
            if of.coded:
                parity = builder.mul(builder.and_(step, _WORD(1)), _WORD(PANELS * TILE_BYTES))
                buffer = builder.add(builder.add(scratch, _WORD(BUFFER)), parity)
                return [builder.add(buffer, _WORD(panel * TILE_BYTES)) for panel in range(width)]
            return [place_of(builder, of, start, step)[0] for start in starts]

        def prepare(step: ir.Value, tiles: list[ir.Value], inside: ir.Value, heads: list[TileHead | None]) -> None:
            """Unpack a step's codes, and prefetch those of a later step; after the last step, the next panels'."""
            fetch_later(builder, of.tile_bytes, of.steps, step, steps, weights, width)
            for tile, head, place in zip(tiles, heads, tiles_of(step), strict=True):
                fetch_panel(builder, of, builder.add(tile, next_panels), inside)
                unpack_pairs(builder, of, tile, inside, head, place)

        def unpack_and_multiply() -> None:
            """Unpack all steps, and multiply each while the next one is unpacked. A tile is opened once."""
            with cgutils.for_range(builder, builder.udiv(steps, _WORD(of.steps))) as loop:
                begin = builder.mul(loop.index, _WORD(of.tile_bytes))
                tiles = [builder.add(start, begin) for start in starts]
                heads = [open_tile(builder, of, tile) for tile in tiles]
                with cgutils.for_range(builder, _WORD(of.steps)) as inner:
                    step = builder.add(builder.mul(loop.index, _WORD(of.steps)), inner.index)
                    prepare(step, tiles, inner.index, heads)
                    with builder.if_then(builder.icmp_signed(">", step, _WORD(0))):
                        multiply_step(builder.sub(step, _WORD(1)))

        def multiply_step(step: ir.Value) -> None:
            for panel, at in enumerate(tiles_of(step)):
                call(builder, "llvm.x86.tileloadd64", matrix[panel], pointer(builder, at), _WORD(64))
            here = builder.add(x, builder.mul(step, _WORD(2 * STEP)))
            for tile in range(count):
                offset = last if tile == count - 1 else builder.mul(stride, _WORD(tile * TILE_ROWS))
                of_rows = rows[tile % 2]
                call(builder, "llvm.x86.tileloadd64", of_rows, pointer(builder, builder.add(here, offset)), stride)
                for panel in range(width):
                    call(builder, "llvm.x86.tdpbf16ps", sums[tile][panel], of_rows, matrix[panel])

        for number in itertools.chain(*sums):
            call(builder, "llvm.x86.tilezero", number)
        end = builder.sub(steps, _WORD(1))
        if of.coded:
            unpack_and_multiply()
        else:
            with cgutils.for_range(builder, end) as loop:
                multiply_step(loop.index)
        multiply_step(end)
        for tile in range(count):
            for panel in range(width):
                place = pointer(builder, builder.add(scratch, _WORD(tile * TILE_ROWS * ROW_BYTES + panel * 64)))
                call(builder, "llvm.x86.tilestored64", sums[tile][panel], place, _WORD(ROW_BYTES))
        return context.get_dummy_value()

    return types.void(tiles, panels, layout, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def add_tiles(
    context: Any,
    tiles: Any,
    panels: Any,
    fresh: Any,
    x: Any,
    last: Any,
    stride: Any,
    weights: Any,
    apart: Any,
    steps: Any,
    sums: Any,
    sums_apart: Any,
) -> Any:
    """Add products of `tiles` tiles of rows with `panels` panels, one or two each, to `sums`: for each panel [tiles,
    16, 16] float32. Between two blocks of inputs, sums are stored as the float32 that they are, without a rounding.

    tiles, panels: compile-time constants. fresh: 1: sums begin at zero. x, last, stride: as for `sum_tiles`. weights:
    address of `steps` steps of bfloat16; the next panel's are `apart` bytes further, and its sums `sums_apart` bytes.
    """
    count, width = tiles.literal_value, panels.literal_value
    cells = [(tile, panel, _BYTE(tile * width + panel)) for tile in range(count) for panel in range(width)]
    rows, matrix = [_BYTE(4), _BYTE(5)], [_BYTE(6), _BYTE(7)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fresh, x, last, stride, weights, apart, steps, sums, sums_apart = args[2:]

        def place(tile: int, panel: int) -> ir.Value:
            at = builder.add(sums, builder.mul(sums_apart, _WORD(panel)))
            return pointer(builder, builder.add(at, _WORD(tile * TILE_BYTES)))

        with builder.if_else(builder.icmp_signed("==", fresh, _WORD(1))) as (then, otherwise):
            with then:
                for *_, number in cells:
                    call(builder, "llvm.x86.tilezero", number)
            with otherwise:
                for tile, panel, number in cells:
                    call(builder, "llvm.x86.tileloadd64", number, place(tile, panel), _WORD(LINE_BYTES))
        starts = [x, builder.add(x, last)][-count:]
        with cgutils.for_range(builder, steps) as loop:
            here = builder.add(weights, builder.mul(loop.index, _WORD(TILE_BYTES)))
            for panel in range(width):
                at = builder.add(here, builder.mul(apart, _WORD(panel)))
                call(builder, "llvm.x86.tileloadd64", matrix[panel], pointer(builder, at), _WORD(LINE_BYTES))
            inputs = builder.mul(loop.index, _WORD(2 * STEP))
            for tile in range(count):
                at = builder.add(starts[tile], inputs)
                call(builder, "llvm.x86.tileloadd64", rows[tile], pointer(builder, at), stride)
                for panel in range(width):
                    call(builder, "llvm.x86.tdpbf16ps", cells[tile * width + panel][2], rows[tile], matrix[panel])
        for tile, panel, number in cells:
            call(builder, "llvm.x86.tilestored64", number, place(tile, panel), _WORD(LINE_BYTES))
        return context.get_dummy_value()

    return types.void(tiles, panels, *[types.int64] * 9), generate


@intrinsic(prefer_literal=True)
def sum_vectors(
    context: Any,
    most: Any,
    rows: Any,
    x: Any,
    stride: Any,
    weights: Any,
    panel_bytes: Any,
    steps: Any,
    scratch: Any,
    scratch_stride: Any,
) -> Any:
    """Write products of `rows` rows, at most `most`, with two panels, to `scratch`: [rows, 2 * 16] float32, one row
    every `scratch_stride` bytes.

    most: a compile-time constant. x: address of the first row, one every `stride` bytes. weights: address of the first
    panel, of bfloat16; the next is `panel_bytes` further.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, x, stride, weights, panel_bytes, steps, scratch, scratch_stride = args[1:]
        panels = [weights, builder.add(weights, panel_bytes)]
        for count in row_counts(builder, rows, most.literal_value):
            with (
                sums_in_registers(builder, count, PANELS, x, stride, scratch, scratch_stride) as (starts, sums),
                cgutils.for_range(builder, steps) as loop,
            ):
                fetch_later(builder, TILE_BYTES, 1, loop.index, steps, weights, PANELS)
                here = [builder.add(start, builder.mul(loop.index, _WORD(2 * STEP))) for start in starts]
                tiles = [builder.add(panel, builder.mul(loop.index, _WORD(TILE_BYTES))) for panel in panels]
                add_pairs(builder, sums, here, tiles, STEP // 2)
        return context.get_dummy_value()

    return types.void(most, *[types.int64] * 8), generate


def row_counts(builder: ir.IRBuilder, rows: ir.Value, most: int) -> Iterator[int]:
    """Yield each of 1 to `most`: the code emitted for it runs if that is the number of rows, one of these. With code of
    their own, two rows take two thirds of the time of four.
    """
    end = builder.append_basic_block("summed")
    blocks = [builder.append_basic_block(f"rows.{count}") for count in range(1, most + 1)]
    switch = builder.switch(rows, blocks[-1])
    for count, block in enumerate(blocks[:-1], 1):
        switch.add_case(_WORD(count), block)
    for count, block in enumerate(blocks, 1):
        builder.position_at_end(block)
        yield count
        builder.branch(end)
    builder.position_at_end(end)


@contextmanager
def sums_in_registers(
    builder: ir.IRBuilder,
    count: int,
    panels: int,
    x: ir.Value,
    stride: ir.Value,
    scratch: ir.Value,
    scratch_stride: ir.Value,
    scratch_apart: ir.Value | None = None,
) -> Iterator[tuple[list[ir.Value], list[list[ir.Value]]]]:
    """Sums for `count` rows, zeros at first, to which code emitted inside the context adds. Arguments are as in
    `sum_vectors`. scratch_apart: how many bytes after a row's sums with a panel those with the next one are written, 64
    if it is not given. Yields the rows' addresses, and where the sums are, by row and panel.
    """
    apart = _WORD(4 * LANES) if scratch_apart is None else scratch_apart
    sums = [[cgutils.alloca_once(builder, SUMS) for _ in range(panels)] for _ in range(count)]
    for cell in itertools.chain(*sums):
        builder.store(ir.Constant(SUMS, [0.0] * LANES), cell)
    yield row_starts(builder, count, x, stride), sums
    for there, cells in zip(row_starts(builder, count, scratch, scratch_stride), sums, strict=True):
        for panel, cell in enumerate(cells):
            at = builder.add(there, builder.mul(apart, _WORD(panel)))
            builder.store(builder.load(cell), pointer(builder, at, SUMS), align=4)


def row_starts(builder: ir.IRBuilder, count: int, first: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """Addresses of `count` rows."""
    return [builder.add(first, builder.mul(stride, _WORD(row))) for row in range(count)]


def add_pairs(
    builder: ir.IRBuilder,
    sums: Sequence[Sequence[ir.Value]],
    rows: Sequence[ir.Value],
    panels: Sequence[ir.Value],
    pairs: int,
) -> None:
    """Add the products of the next `pairs` pairs of inputs. sums: cells by row and panel; rows, panels: where the pairs
    of each begin.
    """
    for pair in range(pairs):
        at = [builder.add(panel, _WORD(LINE_BYTES * pair)) for panel in panels]
        matrix = [builder.load(pointer(builder, line, _PAIRS), align=4) for line in at]
        for cells, row in zip(sums, rows, strict=True):
            add_dot(builder, cells, matrix, row, pair)


def add_dot(
    builder: ir.IRBuilder, cells: Sequence[ir.Value], matrix: Sequence[ir.Value], row: ir.Value, pair: int
) -> None:
    """Add a row's `dot` to the sums in its cells."""
    totals = dot(builder, [builder.load(cell) for cell in cells], matrix, row, pair)
    for cell, total in zip(cells, totals, strict=True):
        builder.store(total, cell)


def dot(builder: ir.IRBuilder, sums: Sequence[ir.Value], matrix: Sequence[ir.Value], row: ir.Value, pair: int) -> Any:
    """Return sums + the products of both inputs of a row's pair, for each panel. row: where its inputs begin.

    It is assembly, because LLVM broadcasts the pair with the floating-point instruction (`vbroadcastss`), which makes a
    product of eight rows take a quarter longer (Zen 4), and broadcasts more pairs at a time than registers can hold.
    """
    panels = len(sums)  # operands: new sums, the pair, then the matrix, the row's address, and the sums as they were
    lines = [f"vpbroadcastd {4 * pair}(${2 * panels + 1}), ${panels}"]
    lines += [f"vdpbf16ps ${panels}, ${panels + 1 + panel}, ${panel}" for panel in range(panels)]
    places = [*["=&v"] * (panels + 1), *["v"] * panels, "r", *map(str, range(panels)), "~{memory}"]
    new = ir.LiteralStructType([*[SUMS] * panels, _PAIRS])
    kind = ir.FunctionType(new, [*[_PAIRS] * panels, _WORD, *[SUMS] * panels])
    all_of = builder.asm(kind, "\n".join(lines), ",".join(places), [*matrix, row, *sums], side_effect=True)
    return [builder.extract_value(all_of, panel) for panel in range(panels)]


def fetch_later(
    builder: ir.IRBuilder,
    tile_size: int,
    tile_steps: int,
    step: ir.Value,
    steps: ir.Value,
    weights: ir.Value,
    width: int,
) -> None:
    """Prefetch a later tile of `width` panels, or a step's share of it; after the last tile, the next panels'.

    tile_size, tile_steps: bytes and steps of a tile.
    """
    share = step_lines(tile_size, tile_steps)
    panel = builder.mul(builder.udiv(steps, _WORD(tile_steps)), _WORD(tile_size))
    tile = builder.mul(builder.udiv(step, _WORD(tile_steps)), _WORD(tile_size))
    later = builder.add(tile, _WORD(max(1, _AHEAD // tile_steps) * tile_size))
    others = builder.select(builder.icmp_signed(">=", later, panel), panel, _WORD(0))
    first = builder.add(later, builder.mul(others, _WORD(width - 1)))
    first = builder.add(first, builder.mul(builder.urem(step, _WORD(tile_steps)), _WORD(share)))
    for i in range(width):
        at = builder.add(weights, builder.add(first, builder.mul(panel, _WORD(i))))
        for line in range(0, share, LINE_BYTES):
            fetch_line(builder, builder.add(at, _WORD(line)))


def fetch_panel(builder: ir.IRBuilder, layout: QuantLayout, tile: ir.Value, step: ir.Value) -> None:
    """Prefetch a step's share of a tile of a panel that is multiplied next."""
    share = step_lines(layout.tile_bytes, layout.steps)
    at = builder.add(tile, builder.mul(step, _WORD(share)))
    for line in range(0, share, LINE_BYTES):
        fetch_panel_line(builder, builder.add(at, _WORD(line)))


def step_lines(tile_size: int, tile_steps: int) -> int:
    """Return a step's share of a tile's bytes, in whole lines."""
    return -(-tile_size // tile_steps // LINE_BYTES) * LINE_BYTES
