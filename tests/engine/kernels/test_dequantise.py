"""Blocks dequantised by our kernel have the bits of the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Kind

from benchmarks.kernels.products import put_scales
from engine.kernels.quant.layouts import LAYOUTS
from engine.kernels.quant.stored import StoredMatrix

KINDS = [layout.kind for layout in LAYOUTS if layout.coded]
HALVES = {layout.kind: [at for at in (layout.scale, layout.offset) if at is not None] for layout in LAYOUTS}


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_have_the_bits_of_the_package(kind: str) -> None:
    inputs, size = GGML_QUANT_SIZES[Kind[kind]]
    generator = np.random.default_rng(3)
    raw = generator.integers(0, 256, (40, 4, size), np.uint8)
    if kind != "MXFP4":
        for at in HALVES[kind]:
            put_scales(raw, at, generator.standard_normal((40, 4)).astype(np.float16))
    else:
        raw[:, :, 0] = np.linspace(0, 250, 160).reshape(40, 4)
    raw = raw.reshape(40, -1)
    expected = torch.from_numpy(dequantize(raw, Kind[kind])).bfloat16()
    found = StoredMatrix(kind, raw).values()
    assert found.shape == (40, 4 * inputs) and torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_a_scale_that_is_no_number_stays_none() -> None:
    raw = np.zeros((1, 18), np.uint8)
    raw[0, :2] = 0xFF
    assert StoredMatrix("Q4_0", raw).values().isnan().all()
