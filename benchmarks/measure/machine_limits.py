"""Measures how fast this machine reads memory and multiplies, at the time of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from engine.device import wait
from engine.kernels.amx import LINE_BYTES, fetch
from engine.kernels.gemm.onednn import pack, packed_product
from engine.kernels.simd import FLOAT32, add, load, splat, store
from engine.kernels.threads import address_of, kernel, num_threads, thread_id
from engine.model.loading import has_native_bfloat16

from ..kernels.arithmetic import loop_of_integers, loop_of_type, multiply_adds_per_s

_MOST_READ = 4 << 30  # bytes; larger than any cache, so a larger buffer is read no slower
_COLUMNS = 1024
_ROWS, _SIDE = {"cpu": 512, "cuda": 4096}, {"cpu": 2048, "cuda": 8192}
_AHEAD = 40 * LINE_BYTES  # bytes ahead of a thread's position; kernels of coded matrices prefetch as far

READ = np.dtype([(name, "i8") for name in ("buffer", "lines", "sums")])


@kernel(READ)
def read_kernel(address: Any) -> None:
    """Read the lines of a buffer, each thread its part, with prefetching."""
    work = carray(address, 1)[0]
    total = splat(np.float32(0))
    for line in range(work.lines * thread_id() // num_threads(), work.lines * (thread_id() + 1) // num_threads()):
        at = work.buffer + LINE_BYTES * line
        fetch(at + _AHEAD)
        total = add(total, load(at, FLOAT32))
    store(total, work.sums + LINE_BYTES * thread_id(), FLOAT32)


class Limits:
    """The best rates found so far; `measure` again next to what they are compared with, since a machine's speed varies.
    multiply_adds_per_s: in the model's type; int8_multiply_adds_per_s: of integer products, 0 where there are none.

    weight_bytes: the buffer that is read has this size, so that it stays in a cache if the weights do.
    """

    def __init__(self, weight_bytes: int, dtype: torch.dtype, device: torch.device):
        self.bytes_per_s = self.multiply_adds_per_s = self.int8_multiply_adds_per_s = 0.0
        cpu = device.type == "cpu"
        self._loop, self._integers = (loop_of_type(dtype), loop_of_integers()) if cpu else (None, None)
        self._device = device
        # A float32 matrix times a vector is torch's fastest way to read; a sum reaches two thirds of it. On a CPU our
        # own loop, which prefetches, may be twice as fast.
        self._read = torch.ones(-(-min(weight_bytes, _MOST_READ) // (4 * _COLUMNS)), _COLUMNS, device=device)
        self._vector = torch.ones(_COLUMNS, device=device)
        rows, side = _ROWS[device.type], _SIDE[device.type]
        if device.type == "cpu" and not has_native_bfloat16():  # products are then in float32
            dtype = torch.float32
        self._multiply_adds = rows * side * side
        self._multiply = _multiplication(
            torch.ones(rows, side, dtype=dtype, device=device), torch.ones(side, side, dtype=dtype, device=device)
        )

    def measure(self) -> None:
        reads: list[Callable[[], Any]] = [partial(self._read.mv, self._vector)]
        if self._device.type == "cpu":
            reads.append(self._read_ahead)
        for read in reads:
            self.bytes_per_s = max(self.bytes_per_s, self._read.nbytes / self._seconds(read))
        if self._loop is None:
            rate = self._multiply_adds / self._seconds(self._multiply)
        else:
            rate = multiply_adds_per_s(self._loop)
        self.multiply_adds_per_s = max(self.multiply_adds_per_s, rate)
        if self._integers is not None:
            self.int8_multiply_adds_per_s = max(self.int8_multiply_adds_per_s, multiply_adds_per_s(self._integers))

    def _read_ahead(self) -> None:
        threads = torch.get_num_threads()
        sums, record = np.zeros(LINE_BYTES * threads, np.uint8), np.zeros(1, READ)
        record[0] = self._read.data_ptr(), self._read.nbytes // LINE_BYTES, sums.ctypes.data
        read_kernel()(address_of(record), threads)

    def _seconds(self, work: Callable[[], Any]) -> float:
        wait(self._device)
        started = time.perf_counter()
        work()
        wait(self._device)
        return time.perf_counter() - started


def _multiplication(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Return the product as in a forward: with a packed matrix where there is one."""
    packed = pack(weight)
    return partial(F.linear, x, weight) if packed is None else partial(packed_product, x, packed, None)
