"""Readers of the factors of a file's blocks, by which the scales and offsets of groups are multiplied: from blocks of
a type [blocks, bytes] to bytes [blocks, factors].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def six_bits(blocks: Bytes) -> Bytes:
    """Read Q4_K and Q5_K: eight factors of the scales and eight of the offsets, four of them in each word."""
    scales, offsets, rest = np.ascontiguousarray(blocks[:, 4:16]).view(np.uint32).T
    low, lower, upper = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    four, two = np.uint32(4), np.uint32(2)
    words = [
        scales & low,
        rest & lower | scales >> two & upper,
        offsets & low,
        rest >> four & lower | offsets >> two & upper,
    ]
    return np.stack(words, axis=1).view(np.uint8)


def signed(blocks: Bytes) -> Bytes:
    """Read Q6_K: sixteen signed factors, to which 128 is added."""
    factors: Bytes = blocks[:, 192:208] ^ np.uint8(128)
    return factors


def in_two_places(blocks: Bytes) -> Bytes:
    """Read IQ4_XS: eight factors whose two upper bits are in one place and the others in another."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    lower = blocks[:, 4:8].repeat(2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4)
    factors: Bytes = (lower & np.uint8(15)) | (upper.astype(np.uint8) & np.uint8(3)) << np.uint8(4)
    return factors


def in_three_places(blocks: Bytes) -> Bytes:
    """Read Q3_K: sixteen factors whose lower four bits are in eight bytes and whose upper two are in four."""
    lower = blocks[:, None, 96:104] >> np.array([[0], [4]], np.uint8)
    upper = blocks[:, None, 104:108] >> np.array([[0], [2], [4], [6]], np.uint8)
    low, high = (part.reshape(len(blocks), 16) for part in (lower, upper))
    factors: Bytes = (low & np.uint8(15)) | (high & np.uint8(3)) << np.uint8(4)
    return factors


def low_and_high(blocks: Bytes) -> Bytes:
    """Read Q2_K: sixteen bytes with a factor of the scale in the lower four bits and one of the offset in the upper."""
    return np.concatenate([blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4)], axis=1)


def nibbles(some: Bytes) -> Bytes:
    """Return both halves of each byte [blocks, bytes], the lower first: [blocks, 2 * bytes]."""
    both: Bytes = some[:, :, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return both.reshape(len(some), -1)
