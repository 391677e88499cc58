"""The record of a kernel: what it reads, in one row of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def record_of(*names: str, floats: tuple[str, ...] = ()) -> np.dtype[Any]:
    """Return the type of a kernel's record: 64-bit addresses, sizes and flags, then float32 numbers."""
    return np.dtype([(name, "i8") for name in names] + [(name, "f4") for name in floats])
