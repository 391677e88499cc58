"""Linear layers of BitNet as the hub stores them: a matrix of -1, 0 and 1 times one scale, of rounded rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.kernels.quant.stored import StoredMatrix, row_bytes

_PACKED, _ALL = "BitLinear", ("BitLinear", "AutoBitLinear")
_TWO_BITS, _BLOCK = "TQ2_0", 256


def is_ternary(linear: Any) -> bool:
    """Return whether this is such a layer of transformers, with no norm of its own before it."""
    return type(linear).__name__ in _ALL and linear.rms_norm is None


@torch.inference_mode()
def ternary_matrix(linear: Any) -> StoredMatrix | Tensor:
    """Return the layer's matrix: in two bits a number where rows are whole blocks and the layer computes in bfloat16,
    and as numbers otherwise.
    """
    codes, scale = _codes_of(linear)
    dtype = linear.dtype if type(linear).__name__ == _PACKED else linear.weight.dtype
    if dtype != torch.bfloat16 or codes.shape[1] % _BLOCK:
        return ((codes.float() - 1) * scale).to(dtype)
    raw = np.empty((len(codes), codes.shape[1] // _BLOCK, row_bytes(_TWO_BITS, _BLOCK)), np.uint8)
    planes = codes.view(len(codes), -1, 2, 4, _BLOCK // 8)  # four codes of a byte lie 32 numbers apart
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    raw[:, :, :-2] = (planes << shifts).sum(3, dtype=torch.uint8).flatten(2).numpy()
    raw[:, :, -2:] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return StoredMatrix(_TWO_BITS, raw.reshape(len(codes), -1))


def _codes_of(linear: Any) -> tuple[Tensor, float]:
    """Return [outputs, inputs] uint8, each number of the matrix and 1, and the scale."""
    weight = linear.weight
    if type(linear).__name__ == _PACKED:  # four parts of the outputs lie in the pairs of bits of the same bytes
        return torch.cat([weight >> 2 * part & 3 for part in range(4)]), 1 / float(linear.weight_scale)
    scale = 1.0 if linear.online_quant else float(linear.weight_scale)
    if linear.online_quant:
        weight = weight.float()
        scale = float(weight.abs().mean().clamp(min=1e-5))
        weight = weight * (1 / scale)
    return weight.round().clamp(-1, 1).add(1).to(torch.uint8), scale
