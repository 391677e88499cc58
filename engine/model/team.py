"""Kernels on all threads of torch's own OpenMP pool.

A second pool would fight torch's for the cores: threads spin between operations just when the other pool computes. So
a kernel is handed to the OpenMP runtime that torch has loaded; where torch uses another one it runs on the caller.

A kernel is a compiled function of one argument, the address of a record (a numpy structured scalar). It shares the
work among `members()` by its own number. What a unit of work gives must not depend on who does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numba
import numpy as np
import torch
from llvmlite import binding
from numba import cfunc, types

_RUNTIMES = ("libgomp.so.1",)  # what torch's wheels for Linux load


def _symbol(name: str) -> int:
    """The address of a function of the OpenMP runtime, 0 if there is none."""
    for runtime in _RUNTIMES:
        try:
            found = getattr(ctypes.CDLL(runtime), name)
        except (OSError, AttributeError):
            continue
        return ctypes.cast(found, ctypes.c_void_p).value or 0
    return 0


@cfunc(types.int32())
def _zero() -> int:
    return 0


@cfunc(types.int32())
def _one() -> int:
    return 1


_PARALLEL = _symbol("GOMP_parallel")
binding.add_symbol("talon_member", _symbol("omp_get_thread_num") or _zero.address)
binding.add_symbol("talon_members", _symbol("omp_get_num_threads") or _one.address)
member = types.ExternalFunction("talon_member", types.int32())
members = types.ExternalFunction("talon_members", types.int32())
_together = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(_PARALLEL)


class Kernel:
    """A compiled kernel over records of one type."""

    def __init__(self, compiled: Any):
        self._address: int = compiled.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def __call__(self, record: int, units: int) -> None:
        """Do the work that the record at that address describes; it has so many units that can be shared."""
        if units < 2 or not _PARALLEL or (threads := torch.get_num_threads()) < 2:
            self._alone(record)
        else:
            _together(self._address, record, min(threads, units), 0)


def kernel(record: np.dtype[Any]) -> Callable[[Callable[[Any], None]], Callable[[], Kernel]]:
    """Decorator: `work(address of a record)` as a kernel, compiled when first asked for and cached on disk.

    Numba's cache sees changes of the file that `work` stands in, and of the signature: a last field, which nobody
    reads, has the checksum of the other sources in its name.
    """

    def decorate(work: Callable[[Any], None]) -> Callable[[], Kernel]:
        @cache
        def compiled() -> Kernel:
            versioned = np.dtype([*record.descr, (f"sources_{_sources():x}", "i8")])
            return Kernel(cfunc(types.void(types.CPointer(numba.from_dtype(versioned))), cache=True)(work))

        return compiled

    return decorate


@cache
def _sources() -> int:
    return crc32((Path(__file__).parent / "simd.py").read_bytes())
