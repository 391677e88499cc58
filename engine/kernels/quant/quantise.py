"""Numbers as blocks of 32 codes: the GGUF types without groups of groups, with llama.cpp's own choice of codes.

Scale and offset of a block come from its extremes. A type without offsets takes the number farthest from zero for its
lowest code (Q8_0: the distance for 127).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from engine.kernels.jit_cache import versioned
from engine.kernels.quant.codes import write_codes
from engine.kernels.quant.layouts import STEP, Bytes, layout_of
from engine.kernels.quant.stored import row_bytes


def quantised(values: NDArray[np.float32], kind: str) -> Bytes:
    """Return [rows, row bytes] of finite numbers [rows, inputs]. kind: Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1. Raises
    ValueError if the inputs are not whole blocks.
    """
    layout = layout_of(kind)
    made = np.zeros((len(values), row_bytes(kind, values.shape[1])), np.uint8)
    numbers = np.ascontiguousarray(values).reshape(-1, STEP)
    blocks = made.reshape(len(numbers), -1)
    scales, offsets = np.empty((2, len(numbers)), np.float32)
    planes = np.array(layout.planes, np.int64)
    _quantise(numbers, layout.bits, layout.signed, layout.offset is not None, planes, scales, offsets, blocks)
    for place, parts in ((layout.scale, scales), (layout.offset, offsets)):
        if place is not None:
            blocks[:, place : place + 2] = parts.astype("<f2")[:, None].view(np.uint8)
    return made


@njit(nogil=True, cache=True, fastmath={"nnan", "nsz"}, error_model="numpy")  # the least and the largest, in vectors
@versioned
def _quantise(
    numbers: Any, bits: int, signed: bool, shifted: bool, planes: Any, scales: Any, offsets: Any, blocks: Any
) -> None:
    """Quantise numbers: [blocks, 32]. shifted: blocks have offsets. Out: scales, offsets [blocks], and the codes in
    blocks.
    """
    codes, half, top = np.empty(STEP, np.uint8), np.float32(1 << (bits - 1)), np.int32((1 << bits) - 1)
    for block in range(len(numbers)):
        some = numbers[block]
        least = largest = some[0]
        for i in range(STEP):
            least, largest = min(least, some[i]), max(largest, some[i])
        far = largest if largest > -least else least
        if largest == -least:
            far = _first_of(some, largest)
        if shifted:
            scale, shift, rounding = (largest - least) / np.float32(top), least, np.float32(0.5)
        elif signed:
            scale, shift, rounding = abs(far) / np.float32(127), np.float32(0), np.float32(0.5)
        else:
            scale, shift, rounding = far / -half, np.float32(0), half + np.float32(0.5)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        scales[block], offsets[block] = scale, shift
        if signed:
            for i in range(STEP):
                x = some[i] * inverse
                codes[i] = np.uint8(np.int8(np.int32(x + (rounding if x >= 0 else -rounding))))
        else:
            for i in range(STEP):
                codes[i] = np.uint8(min(np.int32((some[i] - shift) * inverse + rounding), top))
        write_codes(codes, planes, blocks[block])


@njit(fastmath={"nnan", "nsz"})
def _first_of(some: Any, size: Any) -> Any:
    """Return the first number of that absolute value."""
    for i in range(STEP):
        if abs(some[i]) == size:
            return some[i]
    return size
