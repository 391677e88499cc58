"""Compares a product's kernel with the product in float64, a row alone and beside others, and beside rows of NaN."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.gemm.matmul import Matmul
from engine.kernels.quant.layouts import layout_of
from engine.kernels.quant.stored import StoredMatrix

OUTPUTS, INPUTS = 80, 512
_ROWS = 37


def random_matrix(kind: str) -> StoredMatrix:
    """Return random codes and factors in blocks of that type, with scales of usual size."""
    generator, layout = np.random.default_rng(0), layout_of(kind)
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = generator.integers(0, 256, (OUTPUTS, INPUTS // numbers, size), np.uint8)
    for at in (layout.scale, layout.offset):
        if layout.exponents:
            raw[:, :, 0] = generator.integers(120, 130, raw.shape[:2])
        elif at is not None:
            put_scales(raw, at, generator.uniform(0.5, 1.5, raw.shape[:2]).astype(np.float16))
    return StoredMatrix(kind, raw.reshape(OUTPUTS, -1))


def put_scales(raw: NDArray[np.uint8], at: int, scales: NDArray[np.float16]) -> None:
    """Write a number [outputs, blocks] to byte `at` of each block [outputs, blocks, bytes]. IQ1_M's, which its layout
    has behind the block, lies in the upper four bits of the last four words.
    """
    if at < raw.shape[2]:
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
        return
    fours = scales.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16)
    words = np.ascontiguousarray(raw[:, :, -8:]).view(np.uint16) & np.uint16(0xFFF)
    raw[:, :, -8:] = (words | fours << np.uint16(12)).view(np.uint8)


def difference(product: Matmul, weight: Tensor, dtype: torch.dtype) -> str:
    """Return what is wrong with the product with a matrix of that weight; "" if nothing is."""
    x = torch.randn(_ROWS, INPUTS, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = product(x), x.double() @ weight.double().T
    exact = dtype == torch.float32 and not product.coded
    if not (error := float((found.double() - expected).norm() / expected.norm())) < (1e-5 if exact else 0.02):
        return f"its error is {error:.2g}"
    if not all(torch.equal(product(x[row : row + 1])[0], found[row]) for row in (0, 1, 20, _ROWS - 1)):
        return "a row's bits depend on the rows beside it"
    spoiled = x.clone()
    spoiled[1, 40], spoiled[20] = torch.inf, torch.nan
    beside, others = product(spoiled), [row for row in range(_ROWS) if row not in (1, 20)]
    if not torch.equal(beside[others], found[others]):
        return "an infinity or NaN reaches another row"
    return "an infinity or NaN is hidden" if beside[[1, 20]].isfinite().any() else ""
