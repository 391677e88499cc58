"""AMX's tiles in memory, for processors without them: see `modelled`. Only one thread at a time may call kernels; those
that share a kernel's work have tiles of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding
from numba import cfunc, types

import engine.kernels.amx
from engine.kernels.simd import byte_at, float_at, half_at, int_at, put_float, put_int
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import thread_id

_THREADS, _TILES, _ROWS, _LINE = 64, 8, 16, 64
_TILE = _ROWS * _LINE
_STATE = np.zeros((_THREADS, _LINE + _TILES * _TILE), np.uint8)  # of each thread: the configuration, then the tiles
_STATE_AT, _STATE_BYTES = int(_STATE.ctypes.data), _STATE[0].nbytes
_DEFINED = list[Any]()  # compiled functions, which must outlive the kernels


def install() -> None:
    """Define the tiles' instructions for kernels that are compiled later, which need no leave of Linux's then."""
    engine.kernels.amx.tiles_allowed = lambda: True
    for name, kinds, function in _INSTRUCTIONS:
        compiled = cfunc(types.void(*kinds))(function)
        binding.add_symbol(f"modelled_{name}", compiled.address)
        _DEFINED.append(compiled)


@subroutine
def _configuration() -> Any:
    return _STATE_AT + thread_id() * _STATE_BYTES


@subroutine
def _tile(tile: int) -> Any:
    return _configuration() + _LINE + tile * _TILE


@subroutine
def _size(tile: int) -> Any:
    """Return how many rows a tile has, and how many bytes a row."""
    return byte_at(_configuration() + 48 + tile), byte_at(_configuration() + 16 + 2 * tile)


@subroutine
def _copy(source: int, place: int, count: int) -> None:
    for at in range(0, count, 4):
        put_int(place + at, int_at(source + at))


@subroutine
def _fill(place: int, count: int) -> None:
    for at in range(0, count, 4):
        put_int(place + at, np.int32(0))


def _configure(address: int) -> None:
    _copy(address, _configuration(), _LINE)
    _fill(_tile(0), _TILES * _TILE)


def _release() -> None:
    _fill(_configuration(), _STATE_BYTES)


def _zero(tile: int) -> None:
    _fill(_tile(tile), _TILE)


def _load(tile: int, address: int, stride: int) -> None:
    rows, row_bytes = _size(tile)
    _fill(_tile(tile), _TILE)
    for row in range(rows):
        _copy(address + row * stride, _tile(tile) + row * _LINE, row_bytes)


def _store(tile: int, address: int, stride: int) -> None:
    rows, row_bytes = _size(tile)
    for row in range(rows):
        _copy(_tile(tile) + row * _LINE, address + row * stride, row_bytes)


def _dot(sums: int, rows: int, pairs: int) -> None:
    """TDPBF16PS: each sum takes one input after the other."""
    count, inputs = _size(rows)
    sums_bytes = _size(sums)[1]
    for row in range(count):
        x = _tile(rows) + row * _LINE
        for pair in range(0, inputs, 4):
            for output in range(0, sums_bytes, 4):
                place, at = _tile(sums) + row * _LINE + output, _tile(pairs) + pair // 4 * _LINE + output
                total = float_at(place) + half_at(x + pair) * half_at(at)
                put_float(place, total + half_at(x + pair + 2) * half_at(at + 2))


_INSTRUCTIONS: tuple[tuple[str, list[types.Type], Callable[..., None]], ...] = (
    ("ldtilecfg", [types.int64], _configure),
    ("tilerelease", [], _release),
    ("tilezero", [types.uint8], _zero),
    ("tileloadd64", [types.uint8, types.int64, types.int64], _load),
    ("tilestored64", [types.uint8, types.int64, types.int64], _store),
    ("tdpbf16ps", [types.uint8] * 3, _dot),
)
