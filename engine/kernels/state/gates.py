"""The two float32 numbers that a row has for each head of a gated delta net or of Mamba-2, in the scratch: the share of
the head's state that is kept, and how much the row writes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.kernels.simd import float_at
from engine.kernels.state.walk import row_count, scratch_of
from engine.kernels.subroutine import subroutine

_FORGOTTEN = 1e-18  # a share that is lost in rounding, and would make numbers so small that processors are slow


@subroutine
def gates_of(work: Any, head: int, row: int) -> Any:
    """Return the address of a row's two numbers of a head, which lie behind the channels of all rows."""
    rows = row_count(work.walk)
    return scratch_of(work.walk) + 4 * work.channels * rows + 8 * (head * rows + row)


@subroutine
def softplus(x: Any) -> Any:
    """Return log(1 + exp(x)) of a float64, so that a row's bits are those of one function everywhere."""
    return x if x > 20.0 else math.log1p(math.exp(x))


@subroutine
def share_kept(work: Any, head: int, step: Any) -> Any:
    """Return exp(-exp(A) step): the share of a head's state that is kept over a step, a float64."""
    kept = math.exp(np.float64(float_at(work.decay + 4 * head)) * step)
    return np.float32(kept if kept > _FORGOTTEN else 0.0)
