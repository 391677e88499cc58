"""Keys and values rounded to codes of 8 bits (q8_0): where they lie in the pool, and the kernels that write and move
them.

Each 32 neighbouring dimensions of a key or value have one scale, a 127th of their largest amount, kept as float16; a
code is the number over that, rounded to the nearest whole number (`engine.kernels.gemm.int8.rows`). The last group of a
head size that 32 does not divide is padded with zeros. A block of 16 positions, for each head:

    keys      [groups] tiles of a Q8_0 matrix whose outputs are the positions (`engine.kernels.quant.layouts`): scales
              [16] float16, then codes [8, 16, 4], which count from 128
    values    codes [16, dims] int8, then scales [groups, 16] float16

An entry is rounded by itself, when it is written, so its bits depend on nothing else in its block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from engine.kernels.attention.enter import ENTER, normalised, pad, put_queries, rotated, value_of
from engine.kernels.attention.kv_slots import MOVE
from engine.kernels.gemm.int8.layout import SCALE_AT
from engine.kernels.gemm.int8.rows import round_group
from engine.kernels.quant.layouts import STEP as GROUP
from engine.kernels.quant.layouts import Bytes, layout_of
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    copy_half,
    float_at,
    int_at,
    put_float16,
    put_int,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

CODES_KIND = "Q8_0"
Floats = NDArray[np.float32]
_TILE_BYTES, _CODES_AT = layout_of(CODES_KIND).tile_bytes, layout_of(CODES_KIND).codes_at
_WORD, _WORDS = 4, GROUP // 4  # bytes of a key's word in a tile, and words of a group
_BIAS = np.int32(-0x7F7F7F80)  # 128 in each byte


@subroutine
def head_bytes(dims: int) -> Any:
    """Return the bytes of one head's keys in a block, and of its values."""
    return dims // GROUP * _TILE_BYTES


@subroutine
def value_codes_at(block: int, dims: int, lane: int, group: int) -> Any:
    """Return the address of a group of a value's codes, within one head's values of a block."""
    return block + lane * dims + group * GROUP


@subroutine
def value_scales_at(block: int, dims: int, group: int) -> Any:
    """Return the address of a group's scales, [16] float16, within one head's values of a block."""
    return block + LANES * dims + group * LANES * 2


@subroutine
def _key_at(block: int, lane: int, group: int, word: int) -> Any:
    """Return the address of four of a key's codes, within one head's keys of a block."""
    return block + group * _TILE_BYTES + _CODES_AT + (word * LANES + lane) * _WORD


@subroutine
def _key_scale_at(block: int, lane: int, group: int) -> Any:
    return block + group * _TILE_BYTES + 2 * lane


@kernel(ENTER)
def enter_codes_kernel(address: Any) -> None:
    """Enter keys and values in codes, as `engine.kernels.attention.enter` does for numbers."""
    work = carray(address, 1)[0]
    size, heads = work.head_dim * work.width, work.q_per_kv * work.kv_heads
    units, room = work.kv_heads * work.rows, work.scratch + thread_id() * work.dims * 4
    for unit in range(units * thread_id() // num_threads(), units * (thread_id() + 1) // num_threads()):
        kv_head, row = unit // work.rows, unit % work.rows
        x = work.qkv + row * work.stride
        pad(work, room)
        put_queries(work, unit, row, x + kv_head * work.q_per_kv * size, room)
        if work.keys == 0:
            continue
        block, lane = int_at(work.slots + 4 * row) // LANES, int_at(work.slots + 4 * row) % LANES
        at = (block * work.kv_heads + kv_head) * head_bytes(work.dims)
        rotated(work, row, x + (heads + kv_head) * size, work.key_norm, room)
        _put_key(work, room, work.keys + at, lane)
        normalised(work, value_of(work, x, kv_head), work.value_norm, room)
        _put_value(work, room, work.values + at, lane)


@subroutine
def _round(work: Any, x: int) -> None:
    """Round [dims] float32 in place: the groups begin where they did."""
    pad(work, x)  # codes lie where numbers did
    for group in range(work.dims // GROUP):
        at = x + 4 * GROUP * group
        round_group(FLOAT32, at, at)


@subroutine
def _put_key(work: Any, key: int, block: int, lane: int) -> None:
    """Write one head's key, [dims] float32, to its lane of a block. The source is overwritten."""
    _round(work, key)
    for group in range(work.dims // GROUP):
        of = key + 4 * GROUP * group
        put_float16(_key_scale_at(block, lane, group), float_at(of + SCALE_AT))
        for word in range(_WORDS):
            put_int(_key_at(block, lane, group, word), int_at(of + _WORD * word) ^ _BIAS)


@subroutine
def _put_value(work: Any, value: int, block: int, lane: int) -> None:
    """Put a value in its place, as `_put_key` does for its key."""
    _round(work, value)
    for group in range(work.dims // GROUP):
        of = value + 4 * GROUP * group
        put_float16(value_scales_at(block, work.dims, group) + 2 * lane, float_at(of + SCALE_AT))
        place = value_codes_at(block, work.dims, lane, group)
        for i in range(0, GROUP, 4):
            put_int(place + i, int_at(of + i))


@kernel(MOVE)
def move_codes_kernel(address: Any) -> None:
    """Move keys and values in codes, as `engine.kernels.attention.kv_slots` does for numbers."""
    work = carray(address, 1)[0]
    size = head_bytes(work.dims)
    for layer in range(thread_id(), work.layers, num_threads()):
        for i in range(work.count):
            source, place = int_at(work.sources + 4 * i), int_at(work.places + 4 * i)
            for head in range(work.kv_heads):
                old = ((layer * work.blocks + source // LANES) * work.kv_heads + head) * size
                new = ((layer * work.blocks + place // LANES) * work.kv_heads + head) * size
                _move_key(work, work.keys + old, source % LANES, work.keys + new, place % LANES)
                _move_value(work, work.values + old, source % LANES, work.values + new, place % LANES)


@subroutine
def _move_key(work: Any, old: int, source: int, new: int, place: int) -> None:
    for group in range(work.dims // GROUP):
        copy_half(_key_scale_at(old, source, group), _key_scale_at(new, place, group))
        for word in range(_WORDS):
            put_int(_key_at(new, place, group, word), int_at(_key_at(old, source, group, word)))


@subroutine
def _move_value(work: Any, old: int, source: int, new: int, place: int) -> None:
    for group in range(work.dims // GROUP):
        before, after = value_scales_at(old, work.dims, group), value_scales_at(new, work.dims, group)
        copy_half(before + 2 * source, after + 2 * place)
        before = value_codes_at(old, work.dims, source, group)
        after = value_codes_at(new, work.dims, place, group)
        for i in range(0, GROUP, 4):
            put_int(after + i, int_at(before + i))


def decoded(keys: Bytes, values: Bytes, slots: NDArray[np.int32], dims: int) -> tuple[Floats, Floats]:
    """Return the numbers of a layer's entries at these slots, [slots, kv_heads, dims] each. keys, values: [blocks,
    kv_heads, bytes].
    """
    blocks, lanes = slots // LANES, slots % LANES
    of_slots, groups = np.arange(len(slots)), dims // GROUP
    tiles = keys[blocks].reshape(len(slots), keys.shape[1], groups, _TILE_BYTES)
    scales = np.ascontiguousarray(tiles[..., : 2 * LANES]).view(np.float16)[of_slots, :, :, lanes]
    words = tiles[..., _CODES_AT : _CODES_AT + GROUP * LANES].reshape(*tiles.shape[:3], _WORDS, LANES, _WORD)
    codes = words[of_slots, :, :, :, lanes].astype(np.float32).reshape(*scales.shape, GROUP) - np.float32(128)
    of_keys = codes * scales.astype(np.float32)[..., None]
    of_blocks, each = values[blocks], (len(slots), values.shape[1])
    codes = of_blocks[..., : LANES * dims].view(np.int8).reshape(*each, LANES, groups, GROUP)[of_slots, :, lanes]
    halves = np.ascontiguousarray(of_blocks[..., LANES * dims :]).view(np.float16)
    scales = halves.reshape(*each, groups, LANES)[of_slots, :, :, lanes]
    of_values = codes.astype(np.float32) * scales.astype(np.float32)[..., None]
    return of_keys.reshape(*each, dims), of_values.reshape(*each, dims)
