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

from engine.kernels.amx import LINE_BYTES, TILE_BYTES, TILE_ROWS, call, fetch_line, pointer
from engine.kernels.quantised import Form, unpack, unpacked_pairs
from engine.kernels.simd import LANES

STEP = 32
"""Inputs of one tile: the number of inputs is rounded up to a multiple of it."""
PANELS = 2  # multiplied at once
TILES = 4  # of rows, multiplied at once
ROW_BYTES = 64 * PANELS  # of a row of sums
BUFFER = TILES * TILE_ROWS * ROW_BYTES  # its offset in a thread's room, after the sums
_AHEAD = 8  # steps by which tiles are prefetched ahead
_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
SUMS, _PAIRS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)


@intrinsic(prefer_literal=True)
def new_room(context: Any) -> Any:
    """The address of room for the sums of four tiles of rows with two panels, then for two tiles of each panel. It is
    valid until the caller returns.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():  # numba's own function would store zeros, which takes LLVM ten seconds
            room = builder.alloca(ir.ArrayType(_BYTE, BUFFER + 2 * PANELS * TILE_BYTES))
        room.align = 64
        return builder.ptrtoint(room, _WORD)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def sum_tiles(
    context: Any,
    tiles: Any,
    panels: Any,
    form: Any,
    x: Any,
    last: Any,
    stride: Any,
    weights: Any,
    steps: Any,
    room: Any,
) -> Any:
    """Products of `tiles` tiles of rows with `panels` panels, at most four pairs, in `room`: [tiles * 16, 2 * 16]
    float32.

    tiles, panels, form: compile-time constants. x: address of the first row, one every `stride` bytes; the last tile's
    rows begin `last` bytes further. weights: address of the first panel, of that form. A step's codes are unpacked
    while the previous step is multiplied.
    """
    count, width, of = tiles.literal_value, panels.literal_value, Form(form.literal_value)
    size, coded = of.tile_bytes, of is not Form.BFLOAT16
    sums = [[_BYTE(tile * width + panel) for panel in range(width)] for tile in range(count)]
    rows, matrix = [_BYTE(4), _BYTE(5)], [_BYTE(6), _BYTE(7)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, last, stride, weights, steps, room = args[3:]
        panel_bytes = builder.mul(steps, _WORD(size))

        def tiles_of(step: ir.Value) -> list[ir.Value]:
            """Where the bfloat16 tiles of a step's panels are, or will be unpacked."""
            if coded:
                parity = builder.mul(builder.and_(step, _WORD(1)), _WORD(PANELS * TILE_BYTES))
                buffer = builder.add(builder.add(room, _WORD(BUFFER)), parity)
                return [builder.add(buffer, _WORD(panel * TILE_BYTES)) for panel in range(width)]
            return in_matrix(step)

        def in_matrix(step: ir.Value) -> list[ir.Value]:
            """Where a step's tiles are in the matrix, one of each panel."""
            first = builder.add(weights, builder.mul(step, _WORD(size)))
            return [builder.add(first, builder.mul(panel_bytes, _WORD(panel))) for panel in range(width)]

        def prepare(step: ir.Value) -> None:
            """Unpack a step's codes, and prefetch those of a later step; after the last step, the next panels'."""
            fetch_later(builder, step, steps, weights, size, width)
            for at, place in zip(in_matrix(step), tiles_of(step), strict=True):
                unpack(builder, of, at, place)

        def multiply_step(step: ir.Value) -> None:
            for panel, at in enumerate(tiles_of(step)):
                call(builder, "llvm.x86.tileloadd64", matrix[panel], pointer(builder, at), _WORD(64))
            here = builder.add(x, builder.mul(step, _WORD(2 * STEP)))
            for tile in range(count):
                behind = last if tile == count - 1 else builder.mul(stride, _WORD(tile * TILE_ROWS))
                of_rows = rows[tile % 2]
                call(builder, "llvm.x86.tileloadd64", of_rows, pointer(builder, builder.add(here, behind)), stride)
                for panel in range(width):
                    call(builder, "llvm.x86.tdpbf16ps", sums[tile][panel], of_rows, matrix[panel])

        for number in itertools.chain(*sums):
            call(builder, "llvm.x86.tilezero", number)
        end = builder.sub(steps, _WORD(1))
        if coded:
            prepare(_WORD(0))
        with cgutils.for_range(builder, end) as loop:
            if coded:
                prepare(builder.add(loop.index, _WORD(1)))
            multiply_step(loop.index)
        multiply_step(end)
        for tile in range(count):
            for panel in range(width):
                place = pointer(builder, builder.add(room, _WORD(tile * TILE_ROWS * ROW_BYTES + panel * 64)))
                call(builder, "llvm.x86.tilestored64", sums[tile][panel], place, _WORD(ROW_BYTES))
        return context.get_dummy_value()

    return types.void(tiles, panels, form, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def sum_vectors(
    context: Any,
    most: Any,
    panels: Any,
    form: Any,
    keep: Any,
    rows: Any,
    x: Any,
    stride: Any,
    weights: Any,
    steps: Any,
    room: Any,
    room_stride: Any,
    place: Any,
) -> Any:
    """Products of `rows` rows, at most `most`, with `panels` panels, in `room`: [rows, panels * 16] float32, one row
    every `room_stride` bytes.

    most, panels, form, keep: compile-time constants. x: address of the first row, one every `stride` bytes. weights:
    address of the first panel, of that form. keep: 1 to store the unpacked panels at `place`, one after the other.
    """
    width, of, kept = panels.literal_value, Form(form.literal_value), keep.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, *where, place = args[4:]
        _, _, weights, steps, _, _ = where
        for count in row_counts(builder, rows, most.literal_value):
            with sums_in_registers(builder, count, width, of.tile_bytes, 2, *where) as (step, tiles, here, sums):
                if width > 1:  # attention has one panel, and prefetches its blocks itself: they are not contiguous
                    with builder.if_then(builder.icmp_unsigned("!=", weights, place)):  # kept panels are cached
                        fetch_later(builder, step, steps, weights, of.tile_bytes, width)
                matrices = zip(*(pair_vectors(builder, of, tile) for tile in tiles), strict=True)
                for pair, matrix in enumerate(matrices):
                    if kept:
                        for panel, numbers in enumerate(matrix):
                            tile = builder.add(builder.mul(steps, _WORD(panel)), step)
                            at = builder.add(builder.mul(tile, _WORD(TILE_BYTES)), _WORD(64 * pair))
                            builder.store(numbers, pointer(builder, builder.add(place, at), _PAIRS), align=4)
                    for cells, at in zip(sums, here, strict=True):
                        totals = dot(builder, [builder.load(cell) for cell in cells], matrix, at, pair)
                        for cell, total in zip(cells, totals, strict=True):
                            builder.store(total, cell)
        return context.get_dummy_value()

    return types.void(most, panels, form, keep, *[types.int64] * 8), generate


def row_counts(builder: ir.IRBuilder, rows: ir.Value, most: int) -> Iterator[int]:
    """1 to `most`: the code emitted for each runs if that is the number of rows, which must be one of these. With code
    of their own, two rows take two thirds of the time of four.
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
    tile_size: int,
    number_size: int,
    x: ir.Value,
    stride: ir.Value,
    weights: ir.Value,
    steps: ir.Value,
    room: ir.Value,
    room_stride: ir.Value,
) -> Iterator[tuple[ir.Value, list[ir.Value], list[ir.Value], list[list[ir.Value]]]]:
    """Emits the loop over `steps` for `count` rows: code emitted inside the context adds up one step.

    tile_size, number_size: bytes of a panel's tile and of a number of a row. The rest is as in `sum_vectors`. Yields
    the step, the addresses of its tiles and of the rows' inputs, and where the sums are, by row and panel.
    """
    sums = [[cgutils.alloca_once(builder, SUMS) for _ in range(panels)] for _ in range(count)]
    for cell in itertools.chain(*sums):
        builder.store(ir.Constant(SUMS, [0.0] * LANES), cell)
    starts = row_starts(builder, count, x, stride)
    panel_bytes = builder.mul(steps, _WORD(tile_size))
    with cgutils.for_range(builder, steps) as loop:
        first = builder.add(weights, builder.mul(loop.index, _WORD(tile_size)))
        tiles = [builder.add(first, builder.mul(panel_bytes, _WORD(panel))) for panel in range(panels)]
        inputs = builder.mul(loop.index, _WORD(number_size * STEP))
        yield loop.index, tiles, [builder.add(start, inputs) for start in starts], sums
    for there, cells in zip(row_starts(builder, count, room, room_stride), sums, strict=True):
        for panel, cell in enumerate(cells):
            place = pointer(builder, builder.add(there, _WORD(4 * LANES * panel)), SUMS)
            builder.store(builder.load(cell), place, align=4)


def row_starts(builder: ir.IRBuilder, count: int, first: ir.Value, stride: ir.Value) -> list[ir.Value]:
    """Addresses of `count` rows."""
    return [builder.add(first, builder.mul(stride, _WORD(row))) for row in range(count)]


def pair_vectors(builder: ir.IRBuilder, form: Form, tile: ir.Value) -> Iterator[ir.Value]:
    """The 16 pairs of inputs of a tile, each of 16 outputs."""
    if form is not Form.BFLOAT16:
        for numbers in unpacked_pairs(builder, form, tile):
            yield builder.bitcast(numbers, _PAIRS)
    else:
        for pair in range(LANES):
            yield builder.load(pointer(builder, builder.add(tile, _WORD(64 * pair)), _PAIRS), align=4)


def dot(builder: ir.IRBuilder, sums: Sequence[ir.Value], matrix: Sequence[ir.Value], row: ir.Value, pair: int) -> Any:
    """sums + the products of both inputs of a row's pair, for each panel. row: where its inputs begin.

    In assembly, because LLVM broadcasts the pair with the floating-point instruction (`vbroadcastss`), which makes a
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
    builder: ir.IRBuilder, step: ir.Value, steps: ir.Value, weights: ir.Value, size: int, width: int
) -> None:
    """Prefetch the tiles of a later step of `width` panels; after the last step, the next panels'."""
    later = builder.add(step, _WORD(_AHEAD))
    others = builder.select(builder.icmp_signed(">=", later, steps), steps, _WORD(0))
    first = builder.add(later, builder.mul(others, _WORD(width - 1)))
    for panel in range(width):
        at = builder.add(weights, builder.mul(builder.add(first, builder.mul(steps, _WORD(panel))), _WORD(size)))
        for line in range(0, size, LINE_BYTES):
            fetch_line(builder, builder.add(at, _WORD(line)))
