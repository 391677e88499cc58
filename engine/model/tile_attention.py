"""Exact attention of bfloat16 in tiles of AMX, for processors that have them.

A tile holds the queries of up to 16 neighbouring rows and of the heads that share keys. Scores are products of such a
tile with blocks of 16 keys, sums of values are products of its weights, rounded to bfloat16, with blocks of 16 values,
one block of positions after the other. A block that all rows see is read where it lies. Behind these each row has
blocks of its own, gathered from its ancestors' slots, with zeros for what it does not see: they add nothing, not even a
rounding, so that a row's sums are the same bits whichever blocks its neighbours let it share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from engine.model.amx import (
    LINE_BYTES,
    TILE_ROWS,
    configure_tiles,
    fetch,
    pointer,
    release_tiles,
    tile_dot,
    tile_load,
    tile_sizes,
    tile_store,
    tile_zero,
)
from engine.model.attention_work import ATTENTION, first_seen, last_slot, put_shares, softmax
from engine.model.simd import BFLOAT16, FLOAT32, LANES, divide, float_at, int_at, put_float, splat, store
from engine.model.team import kernel, member, members

PANELS = 4  # of 16 dimensions, whose sums are kept in tiles at once
_KEYS, _PANEL = 1024, 512  # bytes of 32 dimensions of a block's keys, and of 16 of its values
_ROW = 2 * LANES  # bytes of a row of weights in a block
_AHEAD = 4  # blocks ahead of which one is asked for
_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, LANES)


TILES = tile_sizes([*[(None, 64)] * 5, (TILE_ROWS, 64), (None, _ROW), (LANES // 2, 64)])
"""0 to 3 are sums, 4 is queries of 32 dimensions, 5 keys, 6 weights of 16 positions, 7 values."""


@kernel(ATTENTION)
def tile_kernel(address: Any) -> None:
    """Units of work are pairs of a tile and a head of keys."""
    work = carray(address, 1)[0]
    for unit in range(member(), work.tile_count * work.kv_heads, members()):
        _attend(work, unit // work.kv_heads, unit % work.kv_heads, work.scratch + member() * work.scratch_bytes)
    release_tiles()


@njit
def _attend(work: Any, tile: int, head: int, scratch: int) -> None:
    """All rows of a tile with one head of keys and the query heads that share it."""
    first, end = int_at(work.tiles + 4 * tile), int_at(work.tiles + 4 * tile + 4)
    count = (end - first) * work.groups
    queries = work.queries + (head * work.rows + first) * work.groups * work.dims * 2
    table = work.tables + 4 * int_at(work.rows_table + 4 * first)
    scores, weights, sums, shares, own = _places(work, count, scratch)

    low, high, common = 1 << 40, 0, 1 << 40  # blocks: the first that some row sees, the end, the end of what all see
    for row in range(first, end):
        low = min(low, first_seen(work, row) // LANES)
        high = max(high, last_slot(work, row) // LANES + 1)
        common = min(common, int_at(work.rows_prefix + 4 * row) // LANES)

    size = min(count, TILE_ROWS)
    configure_tiles(work.tile_sizes + size * 64)
    for start in range(0, count, TILE_ROWS):
        begin = min(start, count - size)  # the last queries may be done again
        for block in range(low, high):
            at = _place_of(work, work.keys, table, block, head)
            _fetch(work, work.keys, table, min(block + _AHEAD, high - 1), head)
            place = scores + begin * work.step * 4 + 4 * LANES * block
            _score(work, queries + begin * work.dims * 2, at, place)

    for row in range(first, end):
        for group in range(work.groups):
            vector = (row - first) * work.groups + group
            of, to = scores + vector * work.step * 4, weights + vector * work.step * 2
            put_float(shares + vector * 4, softmax(work, row, head * work.groups + group, of, to, BFLOAT16))
            for block in range(low, first_seen(work, row) // LANES):
                store(splat(np.float32(0)), to + block * _ROW, BFLOAT16)

    for start in range(0, count, TILE_ROWS):
        begin = min(start, count - size)
        for panel in range(0, work.dims // LANES, PANELS):
            _weigh(work, table, head, first, end, begin, size, panel, low, common, weights, sums, own)

    for vector in range(count):
        share = divide(splat(np.float32(1)), splat(float_at(shares + 4 * vector)))
        row, group = first + vector // work.groups, vector % work.groups
        place = work.out + ((row * work.kv_heads + head) * work.groups + group) * work.head_dim * 2
        put_shares(work, sums + vector * work.dims * 4, share, place)


@njit
def _place_of(work: Any, keys_or_values: int, table: int, block: int, head: int) -> Any:
    """Where a head's part of a block of 16 positions lies."""
    return keys_or_values + (int_at(table + 4 * block) * work.kv_heads + head) * work.dims * _ROW


@njit
def _fetch(work: Any, keys_or_values: int, table: int, block: int, head: int) -> None:
    """Ask for that part ahead of its turn: the blocks of a text lie anywhere."""
    at = _place_of(work, keys_or_values, table, block, head)
    for line in range(0, work.dims * _ROW, LINE_BYTES):
        fetch(at + line)


@njit
def _places(work: Any, count: int, scratch: int) -> Any:
    """Where in `scratch` things lie: scores, weights, sums, their shares, a row's own block with its weights."""
    weights = scratch + count * work.step * 4
    own = weights + count * work.step * 2
    sums = own + scratch_of_own(work.dims)
    return scratch, weights, sums, sums + count * work.dims * 4, own


@njit
def scratch_of_own(dims: int) -> Any:
    """Bytes: the zeros of a vector, one row's weights between those of the others, which are zeros, its values."""
    return 2 * _ROW + TILE_ROWS * _ROW + dims * _ROW


@njit
def _score(work: Any, queries: int, keys: int, place: int) -> None:
    """The products of a tile's queries with one block of keys."""
    tile_zero(0)
    for step in range(work.dims // 32):
        tile_load(4, queries + 64 * step, work.dims * 2)
        tile_load(5, keys + _KEYS * step, 64)
        tile_dot(0, 4, 5)
    tile_store(0, place, work.step * 4)


@njit
def _weigh(
    work: Any,
    table: int,
    head: int,
    first: int,
    end: int,
    begin: int,
    size: int,
    panel: int,
    low: int,
    common: int,
    weights: int,
    sums: int,
    own: int,
) -> None:
    """Sums of values times weights for the queries from `begin` on and some panels of dimensions from `panel` on."""
    panels = min(PANELS, work.dims // LANES - panel)
    zeros, alone = own, own + 2 * _ROW
    values = alone + TILE_ROWS * _ROW
    for i in range(0, (2 + TILE_ROWS) * _ROW, 4 * LANES):
        store(splat(np.float32(0)), own + i, FLOAT32)
    _begin_sums()
    for block in range(low, common):
        at = _place_of(work, work.values, table, block, head)
        _fetch(work, work.values, table, min(block + _AHEAD, common - 1), head)
        tile_load(6, weights + begin * work.step * 2 + block * _ROW, work.step * 2)
        _add(at + panel * _PANEL, panels)
    for row in range(first, end):
        left = max((row - first) * work.groups, begin)
        right = min((row - first + 1) * work.groups, begin + size)
        if left >= right:
            continue
        prefix, begun = int_at(work.rows_prefix + 4 * row), int_at(work.rows_others + 4 * row)
        seen = prefix + int_at(work.rows_others + 4 * row + 4) - begun
        for block in range(max(common, first_seen(work, row) // LANES), (seen + LANES - 1) // LANES):
            for vector in range(left, right):
                _copy_row(weights + vector * work.step * 2 + block * _ROW, alone + (vector - begin) * _ROW)
            _gather(work, table, head, row, block * LANES, seen, panel, panels, values, zeros)
            tile_load(6, alone, _ROW)
            _add(values, panels)
        for vector in range(left, right):
            _copy_row(zeros, alone + (vector - begin) * _ROW)
    _end_sums(sums + begin * work.dims * 4 + panel * 4 * LANES, work.dims * 4, panels)


@njit
def _begin_sums() -> None:
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)


@njit
def _add(values: int, panels: int) -> None:
    """Add the products of the weights in tile 6 with a block's values."""
    tile_load(7, values, 64)
    tile_dot(0, 6, 7)
    if panels > 1:
        tile_load(7, values + _PANEL, 64)
        tile_dot(1, 6, 7)
    if panels > 2:
        tile_load(7, values + 2 * _PANEL, 64)
        tile_dot(2, 6, 7)
    if panels > 3:
        tile_load(7, values + 3 * _PANEL, 64)
        tile_dot(3, 6, 7)


@njit
def _end_sums(place: int, stride: int, panels: int) -> None:
    tile_store(0, place, stride)
    if panels > 1:
        tile_store(1, place + 4 * LANES, stride)
    if panels > 2:
        tile_store(2, place + 8 * LANES, stride)
    if panels > 3:
        tile_store(3, place + 12 * LANES, stride)


@njit
def _gather(
    work: Any,
    table: int,
    head: int,
    row: int,
    position: int,
    seen: int,
    panel: int,
    panels: int,
    place: int,
    zeros: int,
) -> None:
    """The values at 16 positions of a row, laid out as a block's are."""
    for pair in range(LANES // 2):
        even, even_half = _value_at(work, table, head, row, position + 2 * pair, seen, panel)
        odd, odd_half = _value_at(work, table, head, row, position + 2 * pair + 1, seen, panel)
        for i in range(panels):
            even_at = zeros if even == 0 else even + i * _PANEL
            odd_at = zeros if odd == 0 else odd + i * _PANEL
            _join(even_at, even_half, odd_at, odd_half, place + i * _PANEL + pair * 64)


@njit
def _value_at(work: Any, table: int, head: int, row: int, position: int, seen: int, panel: int) -> Any:
    """Address of the vector of pairs that holds the value, 0 if the row does not see it; bits that it is shifted."""
    if position >= seen:
        return 0, 0
    prefix = int_at(work.rows_prefix + 4 * row)
    slot = position
    if position >= prefix:
        slot = int_at(work.others + 4 * (int_at(work.rows_others + 4 * row) + position - prefix))
    block = _place_of(work, work.values, table, slot // LANES, head)
    return block + panel * _PANEL + slot % LANES // 2 * 64, slot % 2 * 16


@intrinsic(prefer_literal=True)
def _copy_row(context: Any, source: Any, place: Any) -> Any:
    """A row of weights."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(16), LANES)
        row = builder.load(pointer(builder, args[0], kind), align=2)
        builder.store(row, pointer(builder, args[1], kind), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _join(context: Any, even: Any, even_half: Any, odd: Any, odd_half: Any, place: Any) -> Any:
    """16 pairs to `place`: of one half each of those at `even` and `odd`, 0 for the lower half, 16 for the upper."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        even, even_half, odd, odd_half, place = args

        def half(address: ir.Value, bits: ir.Value) -> ir.Value:
            pairs = builder.load(pointer(builder, address, _INTS), align=4)
            anything = ir.Constant(_INTS, ir.Undefined)
            shift = builder.insert_element(anything, builder.trunc(bits, _INT), ir.Constant(_INT, 0))
            shift = builder.shuffle_vector(shift, anything, ir.Constant(_INTS, [0] * LANES))
            return builder.and_(builder.lshr(pairs, shift), ir.Constant(_INTS, [0xFFFF] * LANES))

        upper = builder.shl(half(odd, odd_half), ir.Constant(_INTS, [16] * LANES))
        builder.store(builder.or_(half(even, even_half), upper), pointer(builder, place, _INTS), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate
