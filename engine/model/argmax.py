"""The largest logit of every row, read in the type in which the model gives it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

NAN = -1
"""In a token's place where a row holds NaN, which compares with nothing."""
_INFINITY = np.int16(0x7F80 - 0x7F)  # as `_ordered` has it


def argmax(logits: Tensor) -> list[int]:
    """logits: [rows, vocab] -> each row's token of the largest logit, the first of equals; `NAN` where one is NaN."""
    if logits.device.type != "cpu":
        return _in_torch(logits)
    if logits.dtype == torch.bfloat16:  # as float32 numbers a row would be copied first, which takes ten times as long
        found: list[int] = _argmax_bfloat16(logits.view(torch.int16).numpy()).tolist()
        return found
    return _in_numpy(logits)


def _in_numpy(logits: Tensor) -> list[int]:
    """In a tenth of torch's time."""
    scores = logits.float().numpy()
    best = scores.argmax(axis=-1)
    largest = scores[np.arange(len(best)), best]
    found: list[int] = np.where(np.isnan(largest), NAN, best).tolist()
    return found


def _in_torch(logits: Tensor) -> list[int]:
    best = logits.argmax(dim=-1)
    found: list[int] = best.where(~logits.gather(1, best[:, None])[:, 0].isnan(), NAN).tolist()
    return found


def _argmax_bfloat16(bits: Any) -> Any:
    """bits: [rows, vocab] int16, bfloat16 numbers."""
    ordered = _ordered(bits.ravel()).reshape(bits.shape)
    best = ordered.argmax(axis=1)
    return np.where(ordered[np.arange(len(best)), best] <= _INFINITY, best, NAN)


@njit(cache=True, nogil=True)
def _ordered(bits: Any) -> Any:
    """Integers in the order of the bfloat16 numbers with those bits; all NaN come behind infinity."""
    ordered = np.empty_like(bits)
    for i in range(len(bits)):
        x = np.int32(bits[i])
        x ^= (x >> 15) & 0x7FFF  # below zero a larger magnitude is less
        ordered[i] = x - 0x7F  # so far, that NaN below minus infinity wrap around to the other end
    return ordered
