"""Blocks of a GGUF file as bfloat16, rounded once: the bits that the package `gguf` gives, ten times as fast."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numba import njit
from numpy.typing import NDArray

from engine.kernels.jit_cache import versioned
from engine.kernels.quant.codes import read_codes
from engine.kernels.quant.layouts import Bytes, QuantLayout


def dequantise(layout: QuantLayout, raw: Bytes, numbers: NDArray[np.uint16]) -> None:
    """Fill `numbers` [rows, inputs], which lie together, with bits of bfloat16. layout: of codes. raw: [rows, row
    bytes].
    """
    size = GGML_QUANT_SIZES[GGMLQuantizationType[layout.kind]][1]
    blocks = layout.whole(np.ascontiguousarray(raw).reshape(-1, size))
    groups = layout.inputs // layout.group
    scales = _power(blocks) if layout.exponents else _half(blocks, layout.scale)
    offsets = np.full_like(scales, -0.0) if layout.offset is None else _half(blocks, layout.offset)
    if layout.factors is None:
        scales, offsets = scales.repeat(groups, 1), offsets.repeat(groups, 1)
    else:
        factors = layout.factors(blocks).astype(np.float32) - np.float32(layout.factor_bias)
        factors = 2 * factors + 1 if layout.odd else factors
        scales = scales * factors[:, :groups]
        offsets = -(offsets * factors[:, groups:]) if layout.offset is not None else np.full_like(scales, -0.0)
    planes, values = np.array(layout.planes, np.int64), np.array(layout.table if layout.values else (), np.float32)
    bias, flipped = np.float32(layout.bias), np.uint8(128 if layout.signed else 0)
    _numbers(blocks, planes, values, bias, flipped, scales, offsets, numbers.reshape(len(blocks), -1))


def _half(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """Return [blocks, 1] the number at that byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _power(blocks: Bytes) -> NDArray[np.float32]:
    """Return [blocks, 1] half the power of two whose exponent each block begins with, as values are doubled."""
    powers: NDArray[np.float32] = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return powers


@njit(nogil=True, cache=True, error_model="numpy")
@versioned
def _numbers(
    blocks: Any, planes: Any, values: Any, bias: Any, flipped: Any, scales: Any, offsets: Any, numbers: Any
) -> None:
    """Compute numbers = scale * value + offset, each operation rounded to float32. values: of the codes; if there are
    none, a code's value is the code, with these bits flipped, minus the bias.
    """
    inputs, groups = numbers.shape[1], scales.shape[1]
    group = inputs // groups
    codes, made, found = np.empty(inputs, np.uint8), np.empty(inputs, np.float32), np.empty(len(values), np.float32)
    bits_of = made.view(np.uint32)
    for block in range(len(blocks)):
        read_codes(blocks[block], planes, codes)
        for g in range(groups):
            scale, offset = scales[block, g], offsets[block, g]
            some, goal = codes[g * group : (g + 1) * group], made[g * group : (g + 1) * group]
            if len(values):  # groups have more numbers than there are values
                for i in range(len(values)):
                    found[i] = scale * values[i] + offset
                for i in range(group):
                    goal[i] = found[some[i]]
            else:
                for i in range(group):
                    goal[i] = scale * (np.float32(np.uint8(some[i] ^ flipped)) - bias) + offset
        for i in range(inputs):
            whole = bits_of[i]
            rounded = (whole + np.uint32(0x7FFF) + (whole >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            numbers[block, i] = 0x7FC0 if made[i] != made[i] else rounded
