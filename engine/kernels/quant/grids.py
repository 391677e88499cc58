"""Types whose blocks do not hold a code for each number: IQ1, IQ2 and IQ3 hold indices of a grid, whose entries are
four or eight numbers, and signs; TQ1_0 holds five numbers in a byte.

Looking up fours and eights in a product would take longer than multiplying them. Of 512 weights of IQ2_XXS, the 128
entries of grid and signs take 22 ns to gather on a Xeon with AMX, and codes of 3 bits 37 ns to unpack; the indices that
would stay save 72 bytes, which memory reads in 5 ns. Fours take twice as many. The numbers of a type are few, though:
so when a matrix is packed, each gets a code of its own (`engine.kernels.quant.layouts`), of the same value. Codes are
in the order of their values, so that the code of the number of the other sign is the code with all bits turned over.
What they stand for is a constant of numba's kernels.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from engine.kernels.quant.factors import Bytes, nibbles

Words = NDArray[np.uint64]


def _with_signs(amounts: tuple[int, ...], codes: int) -> tuple[int, ...]:
    """Return the values of all codes, with 0 for those that are not used."""
    unused = (0,) * (codes // 2 - len(amounts))
    return (*unused, *(-amount for amount in reversed(amounts)), *amounts, *unused)


IQ2 = _with_signs(quants.IQ2_XXS.grid_map, 8)
IQ3_XXS = _with_signs(quants.IQ3_XXS.grid_map, 16)
IQ3_S = _with_signs(quants.IQ3_S.grid_map, 16)
IQ1 = (-9, -7, -1, 1, 7, 9, 0, 0)
"""In eighths: -1, 0 or 1, and an eighth more or less."""
_ONES = np.uint64(0x0101010101010101)


@cache
def _grid(kind: str, first: int, apart: int) -> NDArray[np.uint32] | Words:
    """Return the entries of a type's grid, a byte for each number. The least is code `first`, the next `apart` more."""
    of = getattr(quants, kind)
    of.init_grid()
    entries = of.grid.reshape(of.grid_shape)
    codes = (first + apart * np.searchsorted(np.array(of.grid_map, np.float32), entries)).astype(np.uint8)
    rows: NDArray[np.uint32] | Words = codes.view(np.uint64 if codes.shape[1] == 8 else np.uint32)[:, 0]
    return rows


@cache
def _turned(all_bits: int) -> Words:
    """Return, for eight sign bits, what turns over the codes of the negative numbers."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    turned: Words = (bits * np.uint8(all_bits)).view(np.uint64)[:, 0]
    return turned


@cache
def _signs() -> Bytes:
    """Return eight sign bits by the lower seven: the number of negative ones is even."""
    return np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)


def _codes(eights: Words) -> Bytes:
    """View [blocks, 32] eights of codes as [blocks, 256]."""
    return np.ascontiguousarray(eights).view(np.uint8).reshape(len(eights), -1)


def _part(blocks: Bytes, begin: int, end: int, kind: str) -> NDArray[np.uint32]:
    """Read bytes of all blocks as numbers of that type, each as 32 bits."""
    return np.ascontiguousarray(blocks[:, begin:end]).view(kind).astype(np.uint32)


def _fields(words: NDArray[np.uint32], shifts: tuple[int, ...], mask: int) -> NDArray[np.uint32]:
    """Return the fields of each word, [blocks, words * shifts]."""
    found: NDArray[np.uint32] = words[:, :, None] >> np.array(shifts, np.uint32) & np.uint32(mask)
    return found.reshape(len(words), -1)


def iq2_xxs_codes(blocks: Bytes) -> Bytes:
    """Look up eights by a byte each, and their signs by seven bits."""
    words = _part(blocks, 2, 66, "<u4")
    indices = np.ascontiguousarray(words[:, ::2]).view(np.uint8)
    signs = _signs()[_fields(words[:, 1::2], (0, 7, 14, 21), 127)]
    return _codes(_grid("IQ2_XXS", 4, 1)[indices] ^ _turned(7)[signs])


def iq2_xxs_factors(blocks: Bytes) -> Bytes:
    """Read the upper four bits of every second word."""
    return _fields(_part(blocks, 2, 66, "<u4")[:, 1::2], (28,), 15).astype(np.uint8)


def iq2_xs_codes(blocks: Bytes) -> Bytes:
    """Look up eights by nine bits each, and their signs by seven."""
    words = _part(blocks, 2, 66, "<u2")
    return _codes(_grid("IQ2_XS", 4, 1)[words & np.uint32(511)] ^ _turned(7)[_signs()[words >> np.uint32(9)]])


def iq2_xs_factors(blocks: Bytes) -> Bytes:
    """Read a factor for sixteen numbers."""
    return nibbles(blocks[:, 66:74])


def iq2_s_codes(blocks: Bytes) -> Bytes:
    """Look up eights by ten bits each; signs have a bit each."""
    upper = _fields(_part(blocks, 66, 74, "u1"), (0, 2, 4, 6), 3)
    indices = blocks[:, 2:34] | upper << np.uint32(8)
    return _codes(_grid("IQ2_S", 4, 1)[indices] ^ _turned(7)[blocks[:, 34:66]])


def iq2_s_factors(blocks: Bytes) -> Bytes:
    """Read a factor for sixteen numbers."""
    return nibbles(blocks[:, 74:82])


def iq3_xxs_codes(blocks: Bytes) -> Bytes:
    """Look up fours by a byte each, and the signs of eight by seven bits."""
    amounts = np.ascontiguousarray(_grid("IQ3_XXS", 8, 1)[blocks[:, 2:66]]).view(np.uint64)
    signs = _signs()[_fields(_part(blocks, 66, 98, "<u4"), (0, 7, 14, 21), 127)]
    return _codes(amounts ^ _turned(15)[signs])


def iq3_xxs_factors(blocks: Bytes) -> Bytes:
    """Read the upper four bits of the words of signs."""
    return _fields(_part(blocks, 66, 98, "<u4"), (28,), 15).astype(np.uint8)


def iq3_s_codes(blocks: Bytes) -> Bytes:
    """Look up fours by nine bits each; signs have a bit each."""
    upper = _fields(_part(blocks, 66, 74, "u1"), tuple(range(8)), 1)
    indices = blocks[:, 2:66] | upper << np.uint32(8)
    amounts = np.ascontiguousarray(_grid("IQ3_S", 8, 1)[indices]).view(np.uint64)
    return _codes(amounts ^ _turned(15)[blocks[:, 74:106]])


def iq3_s_factors(blocks: Bytes) -> Bytes:
    """Read a factor for 32 numbers."""
    return nibbles(blocks[:, 106:110])


def iq1_s_codes(blocks: Bytes) -> Bytes:
    """Look up eights by eleven bits each; 32 numbers are an eighth more or less."""
    words = _part(blocks, 34, 50, "<u2")
    indices = blocks[:, 2:34] | _fields(words, (0, 3, 6, 9), 7) << np.uint32(8)
    more = np.where(words >> np.uint32(15) == 0, _ONES, np.uint64(0)).repeat(4, axis=1)
    return _codes(_grid("IQ1_S", 0, 2)[indices] | more)


def iq1_s_factors(blocks: Bytes) -> Bytes:
    """Read three bits for 32 numbers."""
    return _fields(_part(blocks, 34, 50, "<u2"), (12,), 7).astype(np.uint8)


def iq1_m_rest(blocks: Bytes) -> Bytes:
    """Read the codes, and then the scale, whose bits lie in four places."""
    parts = _fields(_part(blocks, 32, 48, "u1"), (0, 4), 15)
    indices = blocks[:, :32] | (parts & np.uint32(7)) << np.uint32(8)
    more = np.where(parts >> np.uint32(3) == 0, _ONES, np.uint64(0))
    codes = _codes(_grid("IQ1_M", 0, 2)[indices] | more)
    fours = _part(blocks, 48, 56, "<u2") >> np.uint32(12) << np.array([0, 4, 8, 12], np.uint32)
    scales = fours.sum(axis=1, dtype=np.uint32).astype("<u2")
    return np.concatenate([codes, scales[:, None].view(np.uint8)], axis=1)


def iq1_m_factors(blocks: Bytes) -> Bytes:
    """Read three bits for sixteen numbers."""
    return _fields(_part(blocks, 48, 56, "<u2"), (0, 3, 6, 9), 7).astype(np.uint8)


def tq1_codes(blocks: Bytes) -> Bytes:
    """Read five numbers from each byte: the digits, to the base of three, of that fraction of 256."""
    parts = []
    for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**i for i in range(count)], np.uint8)[:, None]
        digits = (blocks[:, None, begin:end] * powers).astype(np.uint16) * 3 >> 8
        parts.append(digits.astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1)
