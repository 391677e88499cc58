"""Blocks of a GGUF file as tiles: see `engine.kernels.quant.layouts`. Some panels at a time, on all threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.jit_cache import cached_njit
from engine.kernels.large_pages import large_pages
from engine.kernels.quant.codes import read_codes
from engine.kernels.quant.layouts import STEP, Bytes, CodeLayout, QuantLayout
from engine.kernels.quant.stored import StoredMatrix
from engine.kernels.simd import LANES
from engine.kernels.subroutine import subroutine

_AT_ONCE = 1 << 20  # bytes of blocks that a thread packs together
MARGIN = 64
"""Bytes after the last tile that kernels may read."""


class Panel(NamedTuple):
    """16 outputs of a matrix from `start` on; those past its end are zeros."""

    matrix: StoredMatrix
    start: int


def panels_of(matrix: StoredMatrix) -> list[Panel]:
    return [Panel(matrix, start) for start in range(0, matrix.shape[0], LANES)]


def packed(panels: Sequence[Panel], code_layout: CodeLayout) -> Tensor:
    """Return [panels, tiles, bytes] uint8. All matrices are of one layout and have the same inputs."""
    layout, inputs = panels[0].matrix.layout, panels[0].matrix.shape[1]
    shape = len(panels), layout.tiles(inputs), layout.tile_bytes
    whole = large_pages(int(np.prod(shape)) + MARGIN)
    tiles: Tensor = whole[:-MARGIN].view(shape)
    some = max(1, _AT_ONCE // (LANES * max(panel.matrix.raw.shape[1] for panel in panels)))

    def pack_some(start: int) -> None:
        goal = tiles[start : start + some].numpy()
        if layout.coded:
            _pack_codes(layout, code_layout, panels[start : start + some], goal)
        else:
            _pack_numbers(panels[start : start + some], goal)

    starts = range(0, len(panels), some)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(pack_some, starts):
            pass
    return tiles


def _pack_numbers(panels: Sequence[Panel], tiles: Bytes) -> None:
    """Pairs of bfloat16, as AVX512-BF16 and AMX multiply them."""
    count, steps, _ = tiles.shape
    full = torch.zeros(count, LANES, steps * STEP, dtype=torch.bfloat16)
    for panel, rows in zip(panels, full, strict=True):
        values = panel.matrix.row_slice(panel.start, panel.start + LANES).values()
        rows[: len(values), : values.shape[1]] = values
    pairs = full.view(count, LANES, steps, STEP // 2, 2).permute(0, 2, 3, 1, 4)
    torch.from_numpy(tiles).view(torch.bfloat16).view(pairs.shape).copy_(pairs)


def _pack_codes(layout: QuantLayout, code_layout: CodeLayout, panels: Sequence[Panel], tiles: Bytes) -> None:
    blocks = tiles.shape[1]
    gathered = np.zeros((len(panels), LANES, panels[0].matrix.raw.shape[1]), np.uint8)
    for panel, rows in zip(panels, gathered, strict=True):
        found = panel.matrix.row_slice(panel.start, panel.start + LANES).bytes_of_rows()
        rows[: len(found)] = found
    whole = layout.whole(gathered.reshape(len(panels) * LANES * blocks, -1))
    raw = whole.reshape(len(panels), LANES, blocks, -1)
    _pack_head(layout, raw, tiles)
    planes = np.array(layout.planes, np.int64)
    if code_layout is CodeLayout.QUADS:
        _place_quads(raw, planes, layout.bits, layout.signed, layout.codes_at, tiles)
    elif code_layout is CodeLayout.WORDS:
        _place_words(raw, planes, layout.bits, layout.codes_at, tiles)
    else:
        tiles[:, :, layout.codes_at :] = 0  # words of 3 and 5 bits are filled bit by bit
        _place_pairs(raw, planes, layout.bits, layout.codes_at, tiles)


def _pack_head(layout: QuantLayout, raw: Bytes, tiles: Bytes) -> None:
    """Write the scales, offsets and factors of all tiles. raw: [panels, 16, tiles, block bytes]."""
    panels, _, blocks, size = raw.shape
    at = 0
    for place, width in ((layout.scale, 1 if layout.exponents else 2), (layout.offset, 2)):
        if place is not None:
            _place_columns(raw, np.array([place]), width, at, tiles)
            at += width * LANES
    if layout.factors is not None:
        factors = layout.factors(raw.reshape(-1, size)).reshape(panels, LANES, blocks, -1)
        kinds = 2 if layout.offset is not None else 1
        columns = np.arange(factors.shape[3]).reshape(kinds, layout.steps, -1)  # [kind, step, half of the step]
        columns = columns.swapaxes(0, 1).reshape(-1)
        if layout.factor_bits == 8:
            _place_columns(factors, columns, 1, at, tiles)
        else:
            _place_fours(factors, columns.reshape(layout.steps, -1), at, tiles)


@cached_njit
def _place_columns(source: Any, columns: Any, width: int, at: int, tiles: Any) -> None:
    """Place `width` bytes from each of these columns on, for each column those of all outputs. source: [panels, 16,
    tiles, bytes]. at: where in a tile they go.
    """
    for panel in range(source.shape[0]):
        for output in range(LANES):
            for block in range(source.shape[2]):
                some, tile = source[panel, output, block], tiles[panel, block]
                for i in range(len(columns)):
                    for byte in range(width):
                        tile[at + (LANES * i + output) * width + byte] = some[columns[i] + byte]


@cached_njit
def _place_fours(source: Any, columns: Any, at: int, tiles: Any) -> None:
    """Place factors of 4 bits, two in a byte, from these columns on. columns: [steps, factors of a step]."""
    steps, count = columns.shape
    size = LANES * count // 2
    for panel in range(source.shape[0]):
        for block in range(source.shape[2]):
            tile = tiles[panel, block]
            tile[at : at + steps * size] = 0
            for output in range(LANES):
                some = source[panel, output, block]
                for step in range(steps):
                    for i in range(count):
                        place = i * LANES + output
                        factor = np.uint32(some[columns[step, i]]) << np.uint32(place // size * 4)
                        tile[at + step * size + place % size] |= np.uint8(factor)


@cached_njit
def _place_pairs(raw: Any, planes: Any, bits: int, codes_at: int, tiles: Any) -> None:
    """Place codes in pairs. raw: [panels, 16, blocks, bytes]. tiles: [panels, blocks, bytes], whose codes are zeros."""
    panels, _, blocks, _ = raw.shape
    codes, step_words = np.empty((tiles.shape[2] - codes_at) * 8 // (bits * LANES), np.uint8), LANES * bits
    eights = codes.view(np.uint64)
    for panel in range(panels):
        for block in range(blocks):
            tile = tiles[panel, block][codes_at:].view(np.uint32)
            for output in range(LANES):
                read_codes(raw[panel, output, block], planes, codes)
                for step in range(len(codes) // STEP):
                    for odd in range(2):
                        down = np.uint64(8 * odd)
                        a = _every_second(eights[4 * step] >> down)
                        b = _every_second(eights[4 * step + 1] >> down)
                        c = _every_second(eights[4 * step + 2] >> down)
                        d = _every_second(eights[4 * step + 3] >> down)
                        words = tile[step * step_words + 2 * (output % 8) + odd : (step + 1) * step_words]
                        _place_lanes(bits, a, b, c, d, output // 8, words)


@subroutine
def _place_lanes(bits: int, a: Any, b: Any, c: Any, d: Any, half: int, words: Any) -> None:
    """Place the codes of pairs 0 to 3, 4 to 7, 8 to 11 and 12 to 15 of a lane, a byte each. words: from
    its first on.
    """
    if bits == 4:
        words[16 * half] = _nibbles(a) | _nibbles(b) << np.uint32(16)
        words[16 * (2 + half)] = _nibbles(c) | _nibbles(d) << np.uint32(16)
    elif bits == 8:
        words[16 * half], words[16 * (2 + half)] = a, b
        words[16 * (4 + half)], words[16 * (6 + half)] = c, d
    elif bits == 2:
        words[16 * half] = np.uint32(_joined(a, b, c, d, 2))
    elif bits == 3:
        _place_threes(_joined(a, b, c, d, 3), half, words)
    elif bits == 6:
        first, low = 16 * 3 * half, np.uint32(0x03030303)
        words[first] = a | (d & low) << np.uint32(6)
        words[first + 16] = b | (d >> np.uint32(2) & low) << np.uint32(6)
        words[first + 32] = c | (d >> np.uint32(4) & low) << np.uint32(6)
    else:
        _place_fives(a, b, c, d, half, words)


@subroutine
def _joined(a: Any, b: Any, c: Any, d: Any, bits: int) -> Any:
    """Put sixteen codes, a byte each, together without gaps."""
    made = np.uint64(0)
    for i, word in enumerate((a, b, c, d)):
        for byte in range(4):
            code = np.uint64(word >> np.uint32(8 * byte) & np.uint32(255))
            made |= code << np.uint64(bits * (4 * i + byte))
    return made


@subroutine
def _place_threes(codes: Any, half: int, words: Any) -> None:
    """Place the codes of 3 bits of a lane's sixteen pairs."""
    words[16 * half] |= np.uint32(codes & np.uint64(0x3FFFFFFF))
    rest = np.uint32(codes >> np.uint64(30))  # pairs 10 to 15
    if half == 0:
        words[32] |= rest
    else:
        words[32] |= (rest & np.uint32(0x3FFF)) << np.uint32(18)
        words[16] |= (rest >> np.uint32(15) & np.uint32(3)) << np.uint32(30)
        words[0] |= (rest >> np.uint32(14) & np.uint32(1) | rest >> np.uint32(16) & np.uint32(2)) << np.uint32(30)


@subroutine
def _place_fives(a: Any, b: Any, c: Any, d: Any, half: int, words: Any) -> None:
    low, high, top = np.uint32(0x07070707), np.uint32(0x18181818), np.uint32(0x01010101)
    if half == 0:
        words[0] |= a | (d & low) << np.uint32(5)
        words[16] |= b
        words[32] |= c
        words[48] |= (d & high) << np.uint32(2)
    else:
        words[16] |= (c & low) << np.uint32(5)
        words[32] |= (d & low) << np.uint32(5)
        words[48] |= a | (d >> np.uint32(3) & top) << np.uint32(7)
        words[64] |= b | (c & high) << np.uint32(2) | (d >> np.uint32(4) & top) << np.uint32(7)


@subroutine
def _every_second(eight: Any) -> Any:
    """Return the even bytes of eight, as a word."""
    x = eight & np.uint64(0x00FF00FF00FF00FF)
    x = (x | x >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return np.uint32((x | x >> np.uint64(16)) & np.uint64(0xFFFFFFFF))


@subroutine
def _nibbles(word: Any) -> Any:
    """Return the lower four bits of a word's bytes, one after the other."""
    x = (word | word >> np.uint32(4)) & np.uint32(0x00FF00FF)
    return (x | x >> np.uint32(8)) & np.uint32(0xFFFF)


@cached_njit
def _place_quads(raw: Any, planes: Any, bits: int, signed: bool, codes_at: int, tiles: Any) -> None:
    """Place codes in quads. raw: [panels, 16, blocks, bytes]. tiles: [panels, blocks, bytes]."""
    panels, _, blocks, _ = raw.shape
    codes, step_words = np.empty((tiles.shape[2] - codes_at) * 8 // (bits * LANES), np.uint8), LANES * bits
    quads, signs = codes.view(np.uint32), np.uint32(0x80808080 if signed else 0)
    for panel in range(panels):
        for block in range(blocks):
            tile = tiles[panel, block][codes_at:].view(np.uint32)
            for output in range(LANES):
                read_codes(raw[panel, output, block], planes, codes)
                for step in range(len(codes) // STEP):
                    words = tile[step * step_words + output : (step + 1) * step_words]
                    some = quads[8 * step : 8 * step + 8]
                    if bits == 8:
                        for i in range(8):
                            words[16 * i] = some[i] ^ signs
                    else:
                        _place_parts(bits, some, words)


@subroutine
def _place_parts(bits: int, quads: Any, words: Any) -> None:
    """Place the lower two or four bits of an output's codes of a step, and the planes of the others."""
    low, one, two = np.uint32(0x0F0F0F0F), np.uint32(0x01010101), np.uint32(0x03030303)
    if bits < 4:
        for i in range(2):
            word = np.uint32(0)
            for j in range(4):
                word |= (quads[i + 2 * j] & two) << np.uint32(2 * j)
            words[16 * i] = word
    else:
        for i in range(4):
            words[16 * i] = quads[i] & low | (quads[i + 4] & low) << np.uint32(4)
    if bits == 3:
        plane = np.uint32(0)
        for i in range(8):
            plane |= (quads[i] >> np.uint32(2) & one) << np.uint32(i)
        words[32] = plane
    elif bits == 5:
        plane = np.uint32(0)
        for i in range(8):
            plane |= (quads[i] >> np.uint32(4) & one) << np.uint32(i)
        words[64] = plane
    elif bits == 6:
        for p in range(2):
            plane = np.uint32(0)
            for i in range(4):
                plane |= (quads[4 * p + i] >> np.uint32(4) & two) << np.uint32(2 * i)
            words[64 + 16 * p] = plane


@cached_njit
def _place_words(raw: Any, planes: Any, bits: int, codes_at: int, tiles: Any) -> None:
    """Place codes in words. raw: [panels, 16, blocks, bytes]. tiles: [panels, blocks, bytes]."""
    panels, _, blocks, _ = raw.shape
    codes, step_words = np.empty((tiles.shape[2] - codes_at) * 8 // (bits * LANES), np.uint8), LANES * bits
    pairs, apart = codes.view(np.uint16), np.empty(len(codes) // 2, np.uint32)
    for panel in range(panels):
        for block in range(blocks):
            tile = tiles[panel, block][codes_at:].view(np.uint32)
            for output in range(LANES):
                read_codes(raw[panel, output, block], planes, codes)
                for i in range(len(pairs)):
                    apart[i] = np.uint32(pairs[i] & np.uint16(0xFF)) | np.uint32(pairs[i] >> np.uint16(8)) << np.uint32(
                        16
                    )
                for step in range(len(codes) // STEP):
                    some = apart[step * STEP // 2 : (step + 1) * STEP // 2]
                    _place_vectors(bits, some, tile[step * step_words + output : (step + 1) * step_words])


@subroutine
def _place_vectors(bits: int, pairs: Any, words: Any) -> None:
    """Place the codes of an output's step, in every 16th word. pairs: of even inputs in the lower half, of odd ones in
    the upper.
    """
    if bits < 6:
        together = 16 // bits
        for v in range(bits):
            word = np.uint32(0)
            for i in range(together):
                word |= pairs[together * v + i] << np.uint32(bits * i)
            if bits % 2 == 1:
                word |= (pairs[15] >> np.uint32(v) & np.uint32(0x00010001)) << np.uint32(15)
            words[16 * v] = word
    elif bits == 6:
        low, high = np.uint32(0x000F000F), np.uint32(0x00030003)
        for v in range(4):
            words[16 * v] = pairs[2 * v] | pairs[2 * v + 1] << np.uint32(6) | (pairs[12 + v] & low) << np.uint32(12)
        for v in range(4, 6):
            a, b = pairs[2 * v + 4] >> np.uint32(4) & high, pairs[2 * v + 5] >> np.uint32(4) & high
            top = (a | b << np.uint32(2)) << np.uint32(12)
            words[16 * v] = pairs[2 * v] | pairs[2 * v + 1] << np.uint32(6) | top
    else:
        for v in range(8):
            words[16 * v] = pairs[2 * v] | pairs[2 * v + 1] << np.uint32(8)
