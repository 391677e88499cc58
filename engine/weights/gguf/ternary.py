"""Matrices of -1, 0 and 1 as bitnet.cpp stores them, `I2_S`: two bits a number, the lowest of four in a byte's upper
bits, and one float32 for the whole matrix behind them.

They are read as TQ2_0, whose blocks hold the same bytes with their pairs of bits the other way round, and the scale as
a float16 each.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

I2_S = 36
"""The number of the type in a file, which the package `gguf` does not know."""
READ_AS = GGMLQuantizationType.TQ2_0
SCALE_BYTES = 32
"""Bytes behind a matrix, the first four of which are its scale."""
_CODES, _PER_BYTE = 64, 4  # bytes of codes in a block, and codes in a byte
_BYTES = np.arange(256, dtype=np.uint8)
_TURNED = (_BYTES & 3) << 6 | (_BYTES >> 2 & 3) << 4 | (_BYTES >> 4 & 3) << 2 | _BYTES >> 6


def stored_bytes(elements: int) -> int:
    """Return the bytes that so many numbers take in a file."""
    return elements // _PER_BYTE + SCALE_BYTES


def blocks_of(codes: NDArray[np.uint8], scale: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return [bytes] blocks of TQ2_0. codes: of whole blocks; scale: its bytes."""
    blocks = np.empty((len(codes) // _CODES, _CODES + 2), np.uint8)
    blocks[:, :_CODES] = _TURNED[codes].reshape(-1, _CODES)
    with np.errstate(over="ignore"):  # an infinity is refused as such
        blocks[:, _CODES:] = scale[:4].view("<f4").astype("<f2").view(np.uint8)
    return blocks.reshape(-1)
