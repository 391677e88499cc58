"""Finds which blocks of keys and values hold only finite numbers: others are not shared.

A block is read once, at the speed of memory. Of codes of 8 bits the scales are read, which lie as
`engine.kernels.attention.kv_codes` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.core.kv_shape import CODE_GROUP, KVShape
from engine.kernels.attention.kv_codes import head_bytes, value_scales_at
from engine.kernels.records import record_of
from engine.kernels.simd import BFLOAT16, LANES, int_at, pointer, put_int
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import address_of, kernel, num_threads, thread_id

FINITE = record_of(
    "keys",  # [layers, blocks, kv_heads, head_bytes]
    "values",
    "places",  # [count] int32: the blocks to look at
    "found",  # [count] int32, 1 at first: becomes 0 for a block that is not finite
    "count",
    "layers",
    "blocks",
    "kv_heads",
    "dims",
    "head_bytes",
    "width",  # bytes of a number; 0: codes of 8 bits
)
_LINE, _SCALES = 64, 2 * LANES  # bytes of numbers read at once, and of a group's scales
_INFINITY, _INFINITY_OF_SCALES = 0x7F800000, 0x7C000000
_INT, _WORD = ir.IntType(32), ir.IntType(64)


@kernel(FINITE)
def _finite_kernel(address: Any) -> None:
    work = carray(address, 1)[0]
    part = work.kv_heads * work.head_bytes
    thread, threads = thread_id(), num_threads()
    begin, end = work.count * thread // threads, work.count * (thread + 1) // threads
    for layer in range(work.layers):  # neighbouring blocks of a layer are neighbours in memory
        for i in range(begin, end):
            at = (layer * work.blocks + int_at(work.places + 4 * i)) * part
            if not _is_finite(work, work.keys + at, work.values + at, part):
                put_int(work.found + 4 * i, np.int32(0))


@subroutine
def _is_finite(work: Any, keys: int, values: int, part: int) -> Any:
    """Return whether one layer's keys and values of a block are all finite."""
    if work.width == BFLOAT16:
        of_keys, of_values = _largest(_LINE, 1, keys, part, _LINE), _largest(_LINE, 1, values, part, _LINE)
        return max(of_keys, of_values) < _INFINITY
    if work.width != 0:
        of_keys, of_values = _largest(_LINE, 0, keys, part, _LINE), _largest(_LINE, 0, values, part, _LINE)
        return max(of_keys, of_values) < _INFINITY
    group_bytes = head_bytes(CODE_GROUP)
    most = _largest(_SCALES, 1, keys, part, group_bytes)
    for head in range(work.kv_heads):
        at = value_scales_at(values + head * work.head_bytes, work.dims, 0)
        most = max(most, _largest(_SCALES, 1, at, work.dims // CODE_GROUP * _SCALES, _SCALES))
    return most < _INFINITY_OF_SCALES


@intrinsic(prefer_literal=True)
def _largest(context: Any, size: Any, halves: Any, address: Any, length: Any, step: Any) -> Any:
    """Return the largest amount, as the bits of a float32, of the numbers in the first `size` bytes of every `step`,
    `length` bytes in all. size, halves: compile-time constants. halves: 1 for numbers of 16 bits, the upper halves of
    float32.
    """
    kind = ir.VectorType(_INT, size.literal_value // 4)
    both = bool(halves.literal_value)

    def same(value: int) -> ir.Constant:
        return ir.Constant(kind, [value] * kind.count)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, length, step = args[2:]

        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        cell = cgutils.alloca_once(builder, kind)
        builder.store(same(0), cell)
        with cgutils.for_range(builder, builder.udiv(length, step)) as loop:
            at = builder.add(address, builder.mul(loop.index, step))
            words = builder.load(pointer(builder, at, kind), align=2)
            amounts = builder.and_(words, same(0x7FFF0000 if both else 0x7FFFFFFF))
            if both:
                amounts = larger(amounts, builder.and_(builder.shl(words, same(16)), same(0x7FFF0000)))
            builder.store(larger(builder.load(cell), amounts), cell)
        most, lanes = builder.load(cell), kind.count
        while lanes > 1:
            lanes //= 2
            order = ir.Constant(kind, [(lane + lanes) % kind.count for lane in range(kind.count)])
            most = larger(most, builder.shuffle_vector(most, most, order))
        return builder.extract_element(most, _INT(0))

    return types.int32(size, halves, *[types.int64] * 3), generate


class FiniteBlocks:
    """Checks the blocks of a pool of that shape. keys, values: their addresses."""

    def __init__(self, shape: KVShape, blocks: int, keys: int, values: int):
        self._work, self._kernel = np.zeros(1, FINITE), _finite_kernel()
        record = self._work[0]
        record["keys"], record["values"], record["layers"], record["blocks"] = keys, values, shape.layers, blocks
        record["kv_heads"], record["dims"], record["head_bytes"] = shape.kv_heads, shape.dims, shape.head_bytes
        record["width"] = 0 if shape.q8_0 else shape.dtype.itemsize

    def __call__(self, blocks: Sequence[int]) -> list[bool]:
        """Return whether each block's keys and values are all finite."""
        places, found = np.array(blocks, np.int32), np.ones(len(blocks), np.int32)
        record = self._work[0]
        record["places"], record["found"] = places.ctypes.data, found.ctypes.data
        record["count"] = len(blocks)
        self._kernel(address_of(self._work), len(blocks))
        return [bool(one) for one in found]
