"""Matrix products of bfloat16 at the speed of memory, whose rows do not depend on each other.

A matrix lies in panels of 16 outputs, and a panel in steps of 32 inputs: [panels, steps, 16 pairs, 16 outputs, 2]. Both
instructions that multiply bfloat16 read that: a tile of AMX is a step, a vector of AVX512-BF16 is a pair. The threads
share the panels, so that each reads its part of the matrix once and in order, whatever the number of rows.

Every result is one fixed sequence of operations over the inputs: a row of a tile is summed without regard to the other
rows, and vectors take one pair after the other. So a row's bits are the same in a product of any number of rows. AMX
and AVX512-BF16 sum in different orders; a machine takes the same one for all numbers of rows.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from engine.model.amx import TILE_BYTES, TILE_ROWS, call, configure_tiles, pointer, release_tiles, tile_sizes
from engine.model.quantised import Quantised, tile_bytes, unpack, unpack_tiles
from engine.model.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add,
    divide,
    exp,
    features,
    float_at,
    load,
    multiply,
    put_half,
    splat,
    store,
)
from engine.model.team import Kernel, Program, address_of, kernel, member, members

STEP = 32
"""Inputs of one tile: the number of inputs is rounded up to a multiple of it."""
_TILE_4, _TILE_8 = tile_bytes(4), tile_bytes(8)
_PANELS = 2  # that are multiplied at once
_TILES = 4  # of rows, that are multiplied at once
_ROW_BYTES = 64 * _PANELS  # of a row of sums
_BUFFER = _TILES * TILE_ROWS * _ROW_BYTES  # in front of it in a thread's room: sums
_UNROLLED = 4  # pairs of one turn of the loop over a step's 16
_BYTE, _INT, _WORD = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_SUMS, _PAIRS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)

MATMUL = np.dtype(
    [
        (name, "i8")
        for name in (
            "x",  # [rows, inputs] bfloat16
            "weights",  # [panels, steps, 16, 16, 2] bfloat16, or the tiles of a quantised matrix
            "bits",  # 4 or 8: of the codes of a quantised matrix; 0: bfloat16
            "scratch",  # [threads, scratch_bytes], where panels of a quantised matrix are unpacked
            "scratch_bytes",
            "bias",  # [panels * 16] float32, or 0
            "out",  # [rows, outputs] bfloat16; gated: [rows, outputs / 2]
            "tiles",  # AMX: configuration for min(rows, 16) rows
            "rows",
            "inputs",  # a multiple of 32
            "outputs",
            "gated",  # 1: panels of gate and up alternate, and silu(gate) * up comes out
        )
    ]
)


@intrinsic(prefer_literal=True)
def _room(context: Any) -> Any:
    """The address of room for the sums of four tiles of rows with two panels, and then for two tiles of each panel; it
    lasts until the caller returns.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, _BUFFER + 2 * _PANELS * TILE_BYTES))
        room.align = 64
        return builder.ptrtoint(room, _WORD)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def _sum_tiles(
    context: Any,
    tiles: Any,
    panels: Any,
    bits: Any,
    x: Any,
    last: Any,
    stride: Any,
    weights: Any,
    steps: Any,
    room: Any,
) -> Any:
    """Sums of `tiles` tiles of rows with `panels` panels, at most four pairs: to `room`, [tiles * 16, 2 * 16] float32.

    tiles, panels, bits: compile-time constants. x: address of the first row, one every `stride` bytes; the last tile's
    rows begin `last` bytes further. weights: address of the first panel, of codes of so many bits or, for 0, of
    bfloat16. A step's codes are unpacked while the step before is multiplied.
    """
    count, width, coded = tiles.literal_value, panels.literal_value, bits.literal_value
    sums = [[_BYTE(tile * width + panel) for panel in range(width)] for tile in range(count)]
    rows, matrix = [_BYTE(4), _BYTE(5)], [_BYTE(6), _BYTE(7)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, last, stride, weights, steps, room = args[3:]
        panel_bytes = builder.mul(steps, _WORD(tile_bytes(coded) if coded else TILE_BYTES))

        def tiles_of(step: ir.Value) -> list[ir.Value]:
            """Where the bfloat16 of a step's panels is, or comes to be."""
            if coded:
                parity = builder.mul(builder.and_(step, _WORD(1)), _WORD(_PANELS * TILE_BYTES))
                buffer = builder.add(builder.add(room, _WORD(_BUFFER)), parity)
                return [builder.add(buffer, _WORD(panel * TILE_BYTES)) for panel in range(width)]
            first = builder.add(weights, builder.mul(step, _WORD(TILE_BYTES)))
            return [builder.add(first, builder.mul(panel_bytes, _WORD(panel))) for panel in range(width)]

        def prepare(step: ir.Value) -> None:
            for panel, place in enumerate(tiles_of(step) if coded else ()):
                at = builder.add(weights, builder.mul(panel_bytes, _WORD(panel)))
                unpack(builder, coded, builder.add(at, builder.mul(step, _WORD(tile_bytes(coded)))), place)

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
        prepare(_WORD(0))
        with cgutils.for_range(builder, end) as loop:
            prepare(builder.add(loop.index, _WORD(1)))
            multiply_step(loop.index)
        multiply_step(end)
        for tile in range(count):
            for panel in range(width):
                place = pointer(builder, builder.add(room, _WORD(tile * TILE_ROWS * _ROW_BYTES + panel * 64)))
                call(builder, "llvm.x86.tilestored64", sums[tile][panel], place, _WORD(_ROW_BYTES))
        return context.get_dummy_value()

    return types.void(tiles, panels, bits, *[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def _sum_vectors(context: Any, rows: Any, panels: Any, x: Any, stride: Any, weights: Any, steps: Any, room: Any) -> Any:
    """Sums of `rows` rows with `panels` panels: to `room`, [rows, 2 * 16] float32.

    rows, panels: compile-time constants. x: address of the first row, one every `stride` bytes; weights: address of the
    first panel.
    """
    count, width = rows.literal_value, panels.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, stride, weights, steps, room = args[2:]
        kind = ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS])
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        sums = [[cgutils.alloca_once(builder, _SUMS) for _ in range(width)] for _ in range(count)]
        for cell in itertools.chain(*sums):
            builder.store(ir.Constant(_SUMS, [0.0] * LANES), cell)
        starts = [builder.add(x, builder.mul(stride, _WORD(row))) for row in range(count)]
        panel_bytes = builder.mul(steps, _WORD(TILE_BYTES))
        anything = ir.Constant(_PAIRS, ir.Undefined)
        with cgutils.for_range(builder, builder.mul(steps, _WORD(TILE_BYTES // 64 // _UNROLLED))) as loop:
            for turn in range(_UNROLLED):
                pair = builder.add(builder.mul(loop.index, _WORD(_UNROLLED)), _WORD(turn))
                at = builder.add(weights, builder.mul(pair, _WORD(64)))
                matrix = []
                for _ in range(width):
                    matrix.append(builder.load(pointer(builder, at, _PAIRS), align=4))
                    at = builder.add(at, panel_bytes)
                for row in range(count):
                    here = builder.add(starts[row], builder.mul(pair, _WORD(4)))
                    two = builder.insert_element(anything, builder.load(pointer(builder, here, _INT), align=2), _INT(0))
                    two = builder.shuffle_vector(two, anything, ir.Constant(_PAIRS, [0] * LANES))
                    for panel, cell in enumerate(sums[row]):
                        builder.store(builder.call(dot, [builder.load(cell), matrix[panel], two]), cell)
        for row in range(count):
            for panel, cell in enumerate(sums[row]):
                place = pointer(builder, builder.add(room, _WORD(row * _ROW_BYTES + panel * 64)), _SUMS)
                builder.store(builder.load(cell), place, align=4)
        return context.get_dummy_value()

    return types.void(rows, panels, *[types.int64] * 5), generate


@njit
def _first_panel(work: Any, part: int, parts: int) -> Any:
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
            _sum_tiles(1, 2, bits, x, last, stride, weights, steps, room)
        elif tiles == 1:
            _sum_tiles(1, 1, bits, x, last, stride, weights, steps, room)
        elif tiles == 2 and width == 2:
            _sum_tiles(2, 2, bits, x, last, stride, weights, steps, room)
        elif tiles == 2:
            _sum_tiles(2, 1, bits, x, last, stride, weights, steps, room)
        else:
            for panel in range(width):
                at, place = weights + panel * steps * size, room + 64 * panel
                if tiles == 3:
                    _sum_tiles(3, 1, bits, x, last, stride, at, steps, place)
                else:
                    _sum_tiles(4, 1, bits, x, last, stride, at, steps, place)

    return sums


_sums, _sums_of_4, _sums_of_8 = _tile_sums(0), _tile_sums(4), _tile_sums(8)


@kernel(MATMUL)
def amx_kernel(address: Any) -> None:
    """Tiles are of min(rows, 16) rows each. The last ones may do rows again that others have done."""
    work = carray(address, 1)[0]
    panel, end = _first_panel(work, member(), members()), _first_panel(work, member() + 1, members())
    if panel == end:
        return
    steps, stride, room = work.inputs // STEP, work.inputs * 2, _room()
    size = min(work.rows, TILE_ROWS)
    once = work.rows <= _TILES * TILE_ROWS
    coded = once and work.bits != 0  # then codes are unpacked on the way
    tiles = (work.rows + TILE_ROWS - 1) // TILE_ROWS if once else 2
    last = min(work.rows, tiles * TILE_ROWS) - size  # where the last tile of some begins
    configure_tiles(work.tiles)
    while panel < end:
        width, first = min(end - panel, _PANELS), panel * steps
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
                _put(work, row + at, size, panel, width, room + tile * TILE_ROWS * _ROW_BYTES)
        panel += width
    release_tiles()


@kernel(MATMUL)
def vector_kernel(address: Any) -> None:
    work = carray(address, 1)[0]
    panel, end = _first_panel(work, member(), members()), _first_panel(work, member() + 1, members())
    steps, stride, room = work.inputs // STEP, work.inputs * 2, _room()
    while panel < end:
        width = min(end - panel, _PANELS)
        weights = _panels_at(work, panel, width, steps)
        row = 0
        while row < work.rows:
            x = work.x + row * stride
            count = _sum_some(work.rows - row, width, x, stride, weights, steps, room)
            _put(work, row, count, panel, width, room)
            row += count
        panel += width


@njit
def _sum_some(rows: int, width: int, x: int, stride: int, weights: int, steps: int, room: int) -> Any:
    """Sums of as many of the rows as fit into registers; how many they are."""
    if width == 1:
        if rows >= 4:
            _sum_vectors(4, 1, x, stride, weights, steps, room)
            return 4
        _sum_vectors(1, 1, x, stride, weights, steps, room)
        return 1
    if rows >= 8:
        _sum_vectors(8, 2, x, stride, weights, steps, room)
        return 8
    if rows >= 4:
        _sum_vectors(4, 2, x, stride, weights, steps, room)
        return 4
    if rows >= 2:
        _sum_vectors(2, 2, x, stride, weights, steps, room)
        return 2
    _sum_vectors(1, 2, x, stride, weights, steps, room)
    return 1


@njit
def _put(work: Any, first: int, rows: int, panel: int, width: int, room: int) -> None:
    """The sums in `room`, [rows, 2 * 16], plus the bias, to the output."""
    for row in range(first, first + rows):
        for i in range(width):
            column = (panel + i) * LANES
            x = _biased(work, room + i * 64, column)
            if work.gated != 0:
                if i == 0:
                    swish = divide(x, add(splat(np.float32(1)), exp(multiply(x, splat(np.float32(-1))))))
                    x = multiply(swish, _biased(work, room + 64, column + LANES))
                    store(x, work.out + (row * work.outputs + column) // 2 * 2, BFLOAT16)
            elif column + LANES <= work.outputs:
                store(x, work.out + (row * work.outputs + column) * 2, BFLOAT16)
            else:
                store(x, room + i * 64, FLOAT32)
                for lane in range(work.outputs - column):
                    put_half(work.out + (row * work.outputs + column + lane) * 2, float_at(room + i * 64 + 4 * lane))
        room += _ROW_BYTES


@njit
def _biased(work: Any, sums: int, column: int) -> Any:
    x = load(sums, FLOAT32)
    if work.bias != 0:
        x = add(x, load(work.bias + 4 * column, FLOAT32))
    return x


class Unit(Enum):
    """What multiplies."""

    AMX = "amx"
    VECTORS = "avx512_bf16"

    def kernel(self) -> Kernel:
        return amx_kernel() if self is Unit.AMX else vector_kernel()


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@cache
def units() -> tuple[Unit, ...]:
    """The units of this processor, the fastest first."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    there = features()
    found = []
    if {"+amx-tile", "+amx-bf16"} <= there:
        process = ctypes.CDLL(None)  # Linux keeps the tiles from processes that have not asked for them
        if process.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
            found.append(Unit.AMX)
    if {"+avx512f", "+avx512bf16"} <= there:
        found.append(Unit.VECTORS)
    return tuple(found)


_CONFIGURATIONS = tile_sizes([*[(None, 64)] * 6, *[(TILE_ROWS, 64)] * 2])
"""0 to 3 are sums, 4 and 5 rows, 6 and 7 hold the matrix."""


class Multiplies(Protocol):
    """A product, by a `Matmul` or in another way."""

    matmul: Matmul | None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]."""


class Matmul:
    """x [rows, inputs] times a matrix [outputs, inputs] of bfloat16, plus the bias.

    gated: the matrix is a gate's and then an up's, of a multiple of 16 outputs each, and silu(gate) * up comes out.
    quantised: the same matrix, kept in place of `weight` if that is what it stands for, bit for bit.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        gated: bool = False,
        unit: Unit | None = None,
        quantised: Quantised | None = None,
    ):
        self.kernel = (unit or units()[0]).kernel()
        self.gated = gated
        self.inputs: int = weight.shape[1]
        self.outputs: int = weight.shape[0] // (2 if gated else 1)
        panels, steps = -(-weight.shape[0] // LANES), -(-self.inputs // STEP)
        biases = torch.zeros(panels * LANES)
        if bias is not None:
            biases[: len(bias)] = bias.detach()
        order = torch.arange(panels * LANES)
        if gated:
            order = _alternate(order)
        self._bias = biases[order] if bias is not None else None
        self.bits = 0
        if quantised is not None and weight.shape[0] % LANES == 0 and torch.equal(quantised.values(), weight):
            self.bits, self._weights = quantised.bits, quantised.rows(order).tiles()
        else:
            full = weight.detach().new_zeros(panels * LANES, steps * STEP)
            full[: len(weight), : self.inputs] = weight.detach()
            self._weights = full[order].view(panels, LANES, steps, STEP // 2, 2).permute(0, 2, 3, 1, 4).contiguous()

    @property
    def padded(self) -> int:
        """Inputs of a row of x as the kernel reads it."""
        return -(-self.inputs // STEP) * STEP

    @property
    def scratch_bytes(self) -> int:
        """Room that each thread needs."""
        return _PANELS * self.padded * LANES * 2 if self.bits else 0

    def record(self, rows: int, x: int, out: int) -> np.ndarray[Any, Any]:
        """A record for the kernel, but for its scratch. x: address of [rows, padded]; out: of [rows, outputs]. At least
        one row.
        """
        made = np.zeros(1, MATMUL)
        record = made[0]
        record["weights"], record["bias"] = self._weights.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()
        record["inputs"], record["outputs"] = self.padded, self.outputs * (2 if self.gated else 1)
        record["gated"], record["x"], record["out"] = self.gated, x, out
        record["bits"], record["scratch_bytes"] = self.bits, self.scratch_bytes
        set_rows(made, rows)
        return made

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]."""
        out = x.new_empty(len(x), self.outputs)
        if len(x):
            x = F.pad(x, (0, self.padded - self.inputs)) if self.padded != self.inputs else x.contiguous()
            record = self.record(len(x), x.data_ptr(), out.data_ptr())
            scratch = torch.empty(torch.get_num_threads() * self.scratch_bytes, dtype=torch.uint8)
            record["scratch"] = scratch.data_ptr()
            self.kernel(address_of(record), self.outputs // LANES)
        return out


def add_product(
    program: Program,
    records: NDArray[Any],
    index: int,
    product: Multiplies,
    x: Tensor,
    out: Tensor,
    used: Callable[[], tuple[Tensor, Tensor]],
) -> None:
    """The next step multiplies x into out: a kernel, described by the record at `index`, if the product is one that
    takes rows as they lie in x. used: the rows of both that a run is about, for any other product.
    """
    matmul = product.matmul
    if matmul is not None and matmul.padded == matmul.inputs:
        records[index : index + 1] = matmul.record(len(x), x.data_ptr(), out.data_ptr())
        program.add(matmul.kernel, address_of(records, index))
    else:

        def multiply_rows() -> None:
            rows, goal = used()
            goal.copy_(product(rows))

        program.call(multiply_rows)


def set_rows(records: np.ndarray[Any, Any], rows: int) -> None:
    """What depends on the number of rows."""
    records["rows"], records["tiles"] = rows, _CONFIGURATIONS[min(rows, TILE_ROWS)].ctypes.data


def _alternate(both: Tensor) -> Tensor:
    """16 of the first half, 16 of the second, and so on."""
    return both.view(2, -1, LANES, *both.shape[1:]).transpose(0, 1).reshape(both.shape)
