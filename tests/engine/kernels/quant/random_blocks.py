"""Random matrices in the blocks of a GGUF file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.kernels.products import put_scales
from engine.kernels.quant.layouts import LAYOUTS, STEP, layout_of
from engine.kernels.quant.stored import StoredMatrix

CODED = [layout.kind for layout in LAYOUTS if layout.coded]
TINY = 2.0**-24
"""The smallest number of float16."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """Codes and factors of all values; scales of both signs, some zero and some as small or as large as can be."""
    generator, layout = np.random.default_rng(seed), layout_of(kind)
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = generator.integers(0, 256, (outputs, inputs // numbers, size), np.uint8)
    for at in (layout.scale, layout.offset):
        if layout.exponents:
            raw[:, :, 0] = generator.integers(2, 200, raw.shape[:2])
        elif at is not None:
            scales = generator.standard_normal(raw.shape[:2]).astype(np.float16)
            extreme = generator.choice([0, TINY, -3 * TINY, 2.0**-14, 900, -900], raw.shape[:2])
            scales = np.where(generator.random(raw.shape[:2]) < 0.3, extreme.astype(np.float16), scales)
            put_scales(raw, at, scales)
    return StoredMatrix(kind, raw.reshape(outputs, -1))


def expected_values(matrix: StoredMatrix) -> Tensor:
    """[outputs, inputs] bfloat16, as the gguf package reads them."""
    return torch.from_numpy(dequantize(matrix.bytes_of_rows(), GGMLQuantizationType[matrix.kind])).bfloat16()


def in_eights(matrix: StoredMatrix) -> StoredMatrix:
    """A matrix of Q4_0 or Q8_0 as Q8_0: with the same scales and codes."""
    codes, scales, _ = read_apart(matrix)
    blocks = codes.reshape(*scales.shape[:2], STEP).astype(np.int8).view(np.uint8)
    raw = np.concatenate([scales.astype(np.float16).view(np.uint8).reshape(*scales.shape[:2], 2), blocks], axis=2)
    return StoredMatrix("Q8_0", raw.reshape(len(raw), -1))


def in_fives(matrix: StoredMatrix) -> StoredMatrix:
    """A matrix of Q4_1 or Q5_1 as Q5_1: with the same scales, offsets and codes, whose fifth bits are zeros."""
    if matrix.kind == "Q5_1":
        return matrix
    scales, codes = np.split(matrix.bytes_of_rows().reshape(matrix.shape[0], -1, 20), [4], axis=2)
    return StoredMatrix("Q5_1", np.concatenate([scales, np.zeros_like(scales), codes], axis=2).reshape(len(scales), -1))


class Parts(NamedTuple):
    """A number is scale * code + offset. codes: [outputs, inputs] int64, or the whole numbers that they stand for;
    around 0 where there are no offsets. scales, offsets: [outputs, steps of 32, 1 or 2 groups] float32; offsets: if
    there are any.
    """

    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None


def read_apart(matrix: StoredMatrix) -> Parts:
    """Read a type whose codes stand for whole numbers, in plain numpy."""
    layout, (outputs, inputs) = matrix.layout, matrix.shape
    blocks = matrix.bytes_of_rows().reshape(outputs * inputs // layout.inputs, -1)
    raw = layout.whole(blocks).reshape(outputs, inputs // layout.inputs, -1)
    codes = np.zeros((*raw.shape[:2], layout.inputs), np.int64)
    for code in range(layout.inputs):
        for at, bits, together, up in layout.planes:
            part, place = divmod(code, together)
            down = part * bits
            byte = raw[:, :, at + down // 8 * together + place].astype(np.int64)
            codes[:, :, code] |= (byte >> down % 8 & (1 << bits) - 1) << up
    if layout.values is not None:
        codes = np.array(layout.values)[codes]
    else:
        codes = codes.astype(np.int8).astype(np.int64) if layout.signed else codes - layout.bias
    scale, offset = (
        None if at is None else raw[:, :, at : at + 2].copy().view(np.float16).astype(np.float32)
        for at in (layout.scale, layout.offset)
    )
    if layout.exponents:
        scale = np.ldexp(np.float32(1), raw[:, :, :1].astype(np.int32) - 128)
    assert scale is not None
    scale *= np.float32(layout.unit)
    if layout.factors is None:
        scale = scale.repeat(layout.inputs // layout.group, axis=2)
    else:
        factors = layout.factors(raw.reshape(-1, raw.shape[2])).astype(np.float32) - layout.factor_bias
        factors = 2 * factors + 1 if layout.odd else factors
        factors = factors.reshape(*raw.shape[:2], -1)
        kinds = np.split(factors, 1 if offset is None else 2, axis=2)
        scale = scale * kinds[0]
        offset = None if offset is None else -(offset * kinds[1])
    groups = inputs // STEP
    scales, offsets = (None if part is None else part.reshape(outputs, groups, -1) for part in (scale, offset))
    return Parts(codes.reshape(outputs, inputs), scales, offsets)
