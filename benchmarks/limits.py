"""How fast this machine reads memory and multiplies, measured there and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.packed_linear import pack, product
from engine.recorded import wait

_MOST_READ = 4 << 30  # bytes; larger than any cache, so a larger buffer is read no slower
_COLUMNS = 1024
_ROWS, _SIDE = {"cpu": 512, "cuda": 4096}, {"cpu": 2048, "cuda": 8192}


class Limits:
    """The best rates seen so far; `measure` again beside what they are compared with, since a machine's speed varies.

    weight_bytes: the buffer that is read is as large, so that it stays in a cache if the weights do.
    """

    def __init__(self, weight_bytes: int, dtype: torch.dtype, device: torch.device):
        self.bytes_per_s = self.multiply_adds_per_s = 0.0
        self._device = device
        # A float32 matrix times a vector reads fastest of what torch has; a sum reaches two thirds of it.
        self._read = torch.ones(-(-min(weight_bytes, _MOST_READ) // (4 * _COLUMNS)), _COLUMNS, device=device)
        self._vector = torch.ones(_COLUMNS, device=device)
        rows, side = _ROWS[device.type], _SIDE[device.type]
        self._multiply_adds = rows * side * side
        self._multiply = _multiplication(
            torch.ones(rows, side, dtype=dtype, device=device), torch.ones(side, side, dtype=dtype, device=device)
        )

    def measure(self) -> None:
        self.bytes_per_s = max(
            self.bytes_per_s, self._read.nbytes / self._seconds(partial(self._read.mv, self._vector))
        )
        self.multiply_adds_per_s = max(self.multiply_adds_per_s, self._multiply_adds / self._seconds(self._multiply))

    def _seconds(self, work: Callable[[], Tensor]) -> float:
        wait(self._device)
        started = time.perf_counter()
        work()
        wait(self._device)
        return time.perf_counter() - started


def _multiplication(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The product as a forward does it: with a packed matrix where there is one."""
    packed = pack(weight)
    return partial(F.linear, x, weight) if packed is None else partial(product, x, packed, None)
