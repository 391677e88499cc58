"""Rounds matrices to codes of 8 bits: for draft heads, since it may change drafts and never a text."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.quant.layouts import STEP
from engine.kernels.quant.stored import StoredMatrix

_AT_ONCE = 4096  # rows that are rounded together, which bounds the memory
_NORMAL = 2.0**-14  # float16 has its full precision from here on


def nearest(weight: Tensor) -> StoredMatrix:
    """Return the codes of 8 bits that are nearest to a matrix [outputs, inputs], inputs a multiple of 32. They miss it
    by half a percent. Where float16 cannot hold a scale, the result is the numbers as bfloat16.
    """
    codes, scales = nearest_codes(weight)
    if scales.dtype != torch.float16:
        return StoredMatrix.of_numbers(weight)
    return StoredMatrix("Q8_0", q8_0_rows(codes, scales))


def q8_0_rows(codes: Tensor, scales: Tensor) -> NDArray[np.uint8]:
    """Return [outputs, bytes], the rows as GGUF's Q8_0 stores them. scales: float16, as `nearest_codes` returns
    them.
    """
    blocks = codes.numpy().reshape(*scales.shape, STEP).view(np.uint8)
    raw = np.concatenate([scales.numpy()[..., None].view(np.uint8), blocks], axis=2)
    return raw.reshape(len(codes), -1)


def nearest_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [outputs, inputs] int8, and scales [outputs, inputs / 32] float16, or float32 where float16 cannot
    hold one.
    """
    parts = [_nearest(rows) for rows in weight.split(_AT_ONCE)]
    codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    halves = scales.half()
    return codes, scales if ((scales > 0) & (halves < _NORMAL)).any() else halves


def values_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Return [outputs, inputs] bfloat16. Raises ValueError if the shapes do not match."""
    if codes.dim() != 2 or scales.shape != (len(codes), codes.shape[1] / STEP):
        raise ValueError(f"scales of shape {list(scales.shape)} do not match codes of shape {list(codes.shape)}")
    whole = codes.float().unflatten(1, (-1, STEP)) * scales.float()[..., None]
    return whole.flatten(1).to(torch.bfloat16)


def _nearest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [rows, inputs] int8 and scales [rows, inputs / 32] float32, as float16 holds them where it does."""
    blocks = rows.detach().float().unflatten(1, (-1, STEP))
    scales = blocks.abs().amax(-1) / 127
    scales = torch.where(scales < _NORMAL, scales, scales.half().float())
    codes = (blocks / scales.clamp(min=1e-30)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(1), scales
