"""Blocks of a GGUF file as tiles: see `engine.kernels.quant.layouts`. Some panels at a time, on all threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from engine.kernels.jit_cache import versioned
from engine.kernels.large_pages import large_pages
from engine.kernels.quant.layouts import STEP, Bytes, QuantLayout
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES

_AT_ONCE = 1 << 20  # bytes of blocks that a thread packs together
MARGIN = 64
"""Bytes after the last tile that kernels may read."""


class Panel(NamedTuple):
    """16 outputs of a matrix from `start` on; those past its end are zeros."""

    matrix: StoredMatrix
    start: int


def panels_of(matrix: StoredMatrix) -> list[Panel]:
    return [Panel(matrix, start) for start in range(0, matrix.shape[0], LANES)]


def packed(panels: Sequence[Panel]) -> Tensor:
    """[panels, tiles, bytes] uint8. All matrices are of one layout and have the same inputs."""
    layout, inputs = panels[0].matrix.layout, panels[0].matrix.shape[1]
    shape = len(panels), layout.tiles(inputs), layout.tile_bytes
    whole = large_pages(int(np.prod(shape)) + MARGIN)
    tiles: Tensor = whole[:-MARGIN].view(shape)
    some = max(1, _AT_ONCE // (LANES * max(panel.matrix.raw.shape[1] for panel in panels)))
    pack = _pack_codes if layout.coded else _pack_numbers

    def pack_some(start: int) -> None:
        pack(layout, panels[start : start + some], tiles[start : start + some].numpy())

    starts = range(0, len(panels), some)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(pack_some, starts):
            pass
    return tiles


def _pack_numbers(layout: QuantLayout, panels: Sequence[Panel], tiles: Bytes) -> None:
    """Pairs of bfloat16, as AVX512-BF16 and AMX multiply them."""
    count, steps, _ = tiles.shape
    full = torch.zeros(count, LANES, steps * STEP, dtype=torch.bfloat16)
    for panel, rows in zip(panels, full, strict=True):
        values = panel.matrix.row_slice(panel.start, panel.start + LANES).values()
        rows[: len(values), : values.shape[1]] = values
    pairs = full.view(count, LANES, steps, STEP // 2, 2).permute(0, 2, 3, 1, 4)
    torch.from_numpy(tiles).view(torch.bfloat16).view(pairs.shape).copy_(pairs)


def _pack_codes(layout: QuantLayout, panels: Sequence[Panel], tiles: Bytes) -> None:
    blocks = tiles.shape[1]
    gathered = np.zeros((len(panels), LANES, panels[0].matrix.raw.shape[1]), np.uint8)
    for panel, rows in zip(panels, gathered, strict=True):
        found = panel.matrix.row_slice(panel.start, panel.start + LANES).bytes_of_rows()
        rows[: len(found)] = found
    raw = gathered.reshape(len(panels), LANES, blocks, -1)
    _pack_head(layout, raw, tiles)
    planes = np.array(layout.planes, np.int64)
    words = tiles[:, :, layout.codes_at :]
    words[:] = 0
    _place_codes(raw, planes, layout.bits, words)


def _pack_head(layout: QuantLayout, raw: Bytes, tiles: Bytes) -> None:
    """The scales, offsets and factors of all tiles. raw: [panels, 16, tiles, block bytes]."""
    panels, _, blocks, size = raw.shape
    at = 0
    for place, width in ((layout.scale, 1 if layout.exponents else 2), (layout.offset, 2)):
        if place is not None:
            numbers = raw[:, :, :, place : place + width].transpose(0, 2, 1, 3)
            tiles[:, :, at : at + width * LANES] = numbers.reshape(panels, blocks, -1)
            at += width * LANES
    if layout.factors is not None:
        factors = layout.factors(raw.reshape(-1, size)).reshape(panels, LANES, blocks, -1)
        kinds = 2 if layout.offset is not None else 1  # [..., kind, step, half of the step]
        factors = factors.reshape(panels, LANES, blocks, kinds, layout.steps, layout.step_factors // kinds)
        ordered = factors.transpose(0, 2, 4, 3, 5, 1).reshape(panels, blocks, -1)
        tiles[:, :, at : at + ordered.shape[2]] = ordered


def blocks_of(matrix: StoredMatrix) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The parts of a matrix of codes: codes [outputs, inputs] uint8, counted from 0; scales and offsets [outputs,
    blocks] float16; factors [outputs, groups * factors of a group] uint8, those of a scale and its offset together.
    """
    layout, (outputs, inputs) = matrix.layout, matrix.shape
    raw = matrix.bytes_of_rows().reshape(outputs, inputs // layout.inputs, -1)
    codes = np.empty((outputs, inputs // layout.inputs, layout.inputs), np.uint8)
    _read_all(np.ascontiguousarray(raw), np.array(layout.planes, np.int64), codes)
    if layout.signed:
        codes ^= 128
    scales, offsets = (
        None if at is None else torch.from_numpy(raw[:, :, at : at + 2].copy().view(np.float16)[:, :, 0])
        for at in (layout.scale, layout.offset)
    )
    assert scales is not None
    factors = None
    if layout.factors is not None:
        read = layout.factors(raw.reshape(-1, raw.shape[2])).reshape(outputs, raw.shape[1], -1)
        if layout.offset is not None:
            read = read.reshape(*read.shape[:2], 2, -1).swapaxes(2, 3)
        factors = torch.from_numpy(np.ascontiguousarray(read).reshape(outputs, -1))
    return torch.from_numpy(codes.reshape(outputs, inputs)), scales, offsets, factors


@njit(nogil=True, cache=True)
@versioned
def _read_all(raw: Any, planes: Any, codes: Any) -> None:
    """raw: [rows, blocks, bytes]. codes: [rows, blocks, inputs of a block]."""
    some = np.empty(codes.shape[2], np.uint32)
    for row in range(codes.shape[0]):
        for block in range(codes.shape[1]):
            _read_codes(raw[row, block], planes, some)
            codes[row, block] = some


@njit(nogil=True, cache=True)
@versioned
def _place_codes(raw: Any, planes: Any, bits: int, tiles: Any) -> None:
    """raw: [panels, 16, blocks, bytes]. tiles: [panels, blocks, bytes] of codes, all zeros."""
    panels, _, blocks, _ = raw.shape
    inputs = tiles.shape[2] * 8 // (bits * LANES)
    step_bytes = LANES * 32 * bits // 8
    codes = np.empty((LANES, inputs), np.uint32)
    for panel in range(panels):
        for block in range(blocks):
            for output in range(LANES):
                _read_codes(raw[panel, output, block], planes, codes[output])
            tile = tiles[panel, block].view(np.uint32)
            for step in range(inputs // 32):
                words = tile[step * step_bytes // 4 : (step + 1) * step_bytes // 4]
                for output in range(LANES):
                    for odd in range(2):
                        lane, half = 2 * (output % 8) + odd, output // 8
                        some = codes[output, 32 * step + odd : 32 * step + 32 : 2]
                        if bits == 4:
                            for g in range(2):
                                words[16 * (2 * g + half) + lane] = _joined(some[8 * g : 8 * g + 8], 8, 4)
                        elif bits == 8:
                            for g in range(4):
                                words[16 * (2 * g + half) + lane] = _joined(some[4 * g : 4 * g + 4], 4, 8)
                        elif bits == 6:
                            for g in range(3):
                                last = _joined(some[12:16] >> (2 * g) & 3, 4, 8)
                                words[16 * (3 * half + g) + lane] = _joined(some[4 * g : 4 * g + 4], 4, 8) | last << 6
                        else:
                            _place_fives(some, half, words[lane:])


@njit
def _read_codes(block: Any, planes: Any, codes: Any) -> None:
    codes[:] = 0
    for plane in planes:
        at, bits, together, up = plane
        mask = np.uint32((1 << bits) - 1)
        for first in range(0, len(codes), together):
            part = first // together
            begin, down = at + part * bits // 8 * together, part * bits % 8
            for i in range(together):
                codes[first + i] |= (np.uint32(block[begin + i]) >> np.uint32(down) & mask) << np.uint32(up)


@njit
def _joined(codes: Any, count: int, bits: int) -> Any:
    """`count` codes in a word, the first in its lowest bits."""
    word = np.uint32(0)
    for i in range(count):
        word |= np.uint32(codes[i]) << np.uint32(bits * i)
    return word


@njit
def _place_fives(codes: Any, half: int, words: Any) -> None:
    """One output's codes of 5 bits. words: of its lane, every sixteenth."""
    groups = [_joined(codes[4 * g : 4 * g + 4], 4, 8) for g in range(4)]
    low, high, top = np.uint32(0x07070707), np.uint32(0x18181818), np.uint32(0x01010101)
    if half == 0:
        for g in range(3):
            words[16 * g] |= groups[g]
        words[0] |= (groups[3] & low) << np.uint32(5)
        words[16 * 3] |= (groups[3] & high) << np.uint32(2)
    else:
        for g in range(2):
            words[16 * (3 + g)] |= groups[g]
            words[16 * (1 + g)] |= (groups[2 + g] & low) << np.uint32(5)
        words[16 * 4] |= (groups[2] & high) << np.uint32(2)
        words[16 * 3] |= (groups[3] >> np.uint32(3) & top) << np.uint32(7)
        words[16 * 4] |= (groups[3] >> np.uint32(4) & top) << np.uint32(7)
