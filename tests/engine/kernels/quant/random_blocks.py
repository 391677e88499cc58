"""Random matrices in the blocks of a GGUF file."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from engine.kernels.quant.layouts import LAYOUTS, layout_of
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
            raw[:, :, 0] = generator.integers(2, 240, raw.shape[:2])
        elif at is not None:
            scales = generator.standard_normal(raw.shape[:2]).astype(np.float16)
            extreme = generator.choice([0, TINY, -3 * TINY, 2.0**-14, 900, -900], raw.shape[:2])
            scales = np.where(generator.random(raw.shape[:2]) < 0.3, extreme.astype(np.float16), scales)
            raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return StoredMatrix(kind, raw.reshape(outputs, -1))


def expected_values(matrix: StoredMatrix) -> Tensor:
    """[outputs, inputs] bfloat16, as the gguf package reads them."""
    return torch.from_numpy(dequantize(matrix.bytes_of_rows(), GGMLQuantizationType[matrix.kind])).bfloat16()
