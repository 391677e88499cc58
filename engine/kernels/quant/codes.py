"""The codes of a file's blocks, a byte each: the form that all compiled loops over blocks share."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.kernels.subroutine import subroutine


@subroutine
def read_codes(block: Any, planes: Any, codes: Any) -> None:
    """Read the codes of a block. block: its bytes. planes: [planes, 4], see `engine.kernels.quant.layouts.Plane`.
    codes: [inputs] uint8, out.
    """
    codes[:] = 0
    for p in range(len(planes)):
        at, bits, together, up = planes[p]
        if together == 1:  # bits, the lowest of a byte first
            for byte in range(len(codes) // 8):
                eight, goal = np.uint32(block[at + byte]), codes[8 * byte : 8 * byte + 8]
                for i in range(8):
                    goal[i] |= np.uint8(eight >> np.uint32(i) & np.uint32(1)) << np.uint8(up)
            continue
        mask = np.uint8((1 << bits) - 1)
        for first in range(0, len(codes), together):
            part = first // together
            begin, down = at + part * bits // 8 * together, np.uint8(part * bits % 8)
            some, goal = block[begin : begin + together], codes[first : first + together]
            for i in range(together):  # slices begin at 0, which LLVM turns into vectors
                goal[i] |= (some[i] >> down & mask) << np.uint8(up)


@subroutine
def write_codes(codes: Any, planes: Any, block: Any) -> None:
    """Write codes into a block. codes: [inputs] uint8. block: its bytes, out, of which those of codes are zeros."""
    for p in range(len(planes)):
        at, bits, together, up = planes[p]
        if together == 1:  # bits, the lowest of a byte first
            for byte in range(len(codes) // 8):
                some, eight = codes[8 * byte : 8 * byte + 8], np.uint32(0)
                for i in range(8):
                    eight |= np.uint32(some[i] >> np.uint8(up) & np.uint8(1)) << np.uint32(i)
                block[at + byte] = np.uint8(eight)
            continue
        mask = np.uint8((1 << bits) - 1)
        for first in range(0, len(codes), together):
            part = first // together
            begin, down = at + part * bits // 8 * together, np.uint8(part * bits % 8)
            some, goal = codes[first : first + together], block[begin : begin + together]
            for i in range(together):
                goal[i] |= (some[i] >> np.uint8(up) & mask) << down
