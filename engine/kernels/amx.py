"""AMX tiles for numba kernels: matrices of 16 rows of 64 bytes that one instruction multiplies.

A tile's number is part of the instruction, so it is a compile-time constant here. Every result is summed over its own
inputs in one fixed order: a row of a tile has the same bits whatever the other rows hold, and however many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from engine.kernels.simd import call_intrinsic, features, pointer

TILE_ROWS = 16
TILE_BYTES = 1024
LINE_BYTES = 64
"""The size of a cache line."""
_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_FIRST_LEVEL, _SECOND_LEVEL = 3, 2
"""Levels of cache, as LLVM's prefetch numbers their localities."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def tiles_allowed() -> bool:
    """Ask Linux for leave to use tiles, which a process does not have by itself; return whether it is given."""
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def tile_sizes(sizes: Sequence[tuple[int | None, int]]) -> NDArray[np.uint8]:
    """Return [17, 64]: for each row count, from 0 on, the configuration for `configure_tiles`. sizes: for tiles 0, 1,
    ..., the rows (None: the row count) and the bytes of a row.
    """
    table = np.zeros((TILE_ROWS + 1, 64), np.uint8)
    table[:, 0] = 1
    for tile, (rows, row_bytes) in enumerate(sizes):
        table[:, 16 + 2 * tile] = row_bytes
        table[:, 48 + tile] = np.arange(TILE_ROWS + 1) if rows is None else rows
    return table


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    """Call an LLVM intrinsic that returns nothing."""
    call_intrinsic(builder, name, ir.VoidType(), *args)


def opaque(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the same address or vector, hiding from LLVM how it was computed.

    Otherwise LLVM counts each of many addresses near it in a register of its own, keeps most of these on the stack, and
    adds to them all in each turn of a loop; and it makes one dear instruction of two that are cheaper.
    """
    kind = "v" if isinstance(value.type, ir.VectorType) else "r"
    if kind == "v" and "+avx512f" not in features():  # no register holds it
        return value
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", f"={kind},0", [value], side_effect=False)


def into_first_level() -> bool:
    """Return whether lines are prefetched into the first level of cache."""
    return "+amx-bf16" in features()


def fetch_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at that address, which need not be valid: the processor itself prefetches no further than
    a page of 4 kB.

    With AMX it goes into the first level of cache; elsewhere into the second, which can wait for more lines at a time.
    On two cores of Zen 4, a product of eight rows with bfloat16 then takes 0.6 of the time, a plain token 0.85,
    attention after 2,000 positions 0.75.
    """
    _prefetch(builder, address, _FIRST_LEVEL if into_first_level() else _SECOND_LEVEL)


def fetch_panel_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at that address, of panels that are multiplied next, into the second level of cache.

    On a Xeon with AMX, one thread, a token then takes 0.95 of the time, in bfloat16 and in int8. Elsewhere it was not
    measured, and nothing is prefetched.
    """
    if into_first_level():
        _prefetch(builder, address, _SECOND_LEVEL)


def _prefetch(builder: ir.IRBuilder, address: ir.Value, locality: int) -> None:
    read, data = 0, 1
    call(builder, "llvm.prefetch", pointer(builder, address), _INT(read), _INT(locality), _INT(data))


@intrinsic(prefer_literal=True)
def fetch(context: Any, address: Any) -> Any:
    """Call `fetch_line` from a kernel."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic(prefer_literal=True)
def configure_tiles(context: Any, sizes: Any) -> Any:
    """Set the tiles' sizes. sizes: address of the processor's tile configuration, 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.ldtilecfg", pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic(prefer_literal=True)
def release_tiles(context: Any) -> Any:
    """Release the thread's tiles."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def tile_zero(context: Any, tile: Any) -> Any:
    number = _BYTE(tile.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilezero", number)
        return context.get_dummy_value()

    return types.void(tile), generate


def _moving(name: str, tile: Any) -> Any:
    """Return what the intrinsics below emit: the named instruction, which moves rows between a tile and memory."""
    number = _BYTE(tile.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, name, number, pointer(builder, args[1]), args[2])
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def tile_load(context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Load a tile's rows from memory, one every `stride` bytes."""
    return _moving("llvm.x86.tileloadd64", tile)


@intrinsic(prefer_literal=True)
def tile_store(context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Store a tile's rows to memory, one every `stride` bytes."""
    return _moving("llvm.x86.tilestored64", tile)


@intrinsic(prefer_literal=True)
def tile_dot(context: Any, sums: Any, rows: Any, pairs: Any) -> Any:
    """Compute sums += rows @ pairs. rows: [m, k] bfloat16; pairs: [k / 2, n, 2] bfloat16; sums: [m, n] float32."""
    numbers = [_BYTE(tile.literal_value) for tile in (sums, rows, pairs)]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tdpbf16ps", *numbers)
        return context.get_dummy_value()

    return types.void(sums, rows, pairs), generate
