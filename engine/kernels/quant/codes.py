"""Reads the codes of a file's blocks, a byte each: what all compiled loops over blocks share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit
def read_codes(block: Any, planes: Any, codes: Any) -> None:
    """block: its bytes. planes: [planes, 4], see `engine.kernels.quant.layouts.Plane`. codes: [inputs] uint8, out."""
    codes[:] = 0
    for p in range(len(planes)):
        at, bits, together, up = planes[p]
        mask = np.uint8((1 << bits) - 1)
        for first in range(0, len(codes), together):
            part = first // together
            begin, down = at + part * bits // 8 * together, np.uint8(part * bits % 8)
            some, goal = block[begin : begin + together], codes[first : first + together]
            for i in range(together):  # over slices from 0 on, which LLVM turns into vectors
                goal[i] |= (some[i] >> down & mask) << np.uint8(up)
