"""Kernels on all threads of torch's own OpenMP pool.

A second pool would compete with torch's for the cores: its threads would spin while the other pool computes. So a
kernel is given to the OpenMP runtime that torch has loaded; if torch uses another runtime, it runs on the caller.

A kernel is a compiled function of one argument, the address of a record (a numpy structured scalar). `num_threads()`
threads share the work, each by its `thread_id()`. The result of a unit of work must not depend on which thread does it.

Waking and releasing the threads costs some ten microseconds, as long as a small matrix takes. A `Program` does it once
for many kernels, which run one after the other with a barrier between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, cfunc, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from engine.kernels.jit_cache import versioned

_RUNTIMES = ("libgomp.so.1",)  # torch's wheels for Linux load these


def _symbol(name: str) -> int:
    """Return the address of a function of the OpenMP runtime, 0 if there is none."""
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


@cfunc(types.void())
def _nothing() -> None:
    return


_PARALLEL = _symbol("GOMP_parallel")
binding.add_symbol("talon_thread_id", _symbol("omp_get_thread_num") or _zero.address)
binding.add_symbol("talon_num_threads", _symbol("omp_get_num_threads") or _one.address)
binding.add_symbol("talon_barrier", _symbol("GOMP_barrier") or _nothing.address)
thread_id = types.ExternalFunction("talon_thread_id", types.int32())
num_threads = types.ExternalFunction("talon_num_threads", types.int32())
barrier = types.ExternalFunction("talon_barrier", types.void())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_together = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(_PARALLEL)


class Kernel:
    """A compiled kernel over records of one type."""

    def __init__(self, compiled: Any):
        self.address: int = compiled.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)

    def __call__(self, record: int, units: int) -> None:
        """Do the work that the record at that address describes; `units` of it can be shared."""
        if units < 2 or not _PARALLEL or (threads := torch.get_num_threads()) < 2:
            self._alone(record)
        else:
            _together(self.address, record, min(threads, units), 0)


def kernel(record: np.dtype[Any], name: str = "") -> Callable[[Callable[[Any], None]], Callable[[], Kernel]]:
    """Make `work(address of a record)` a kernel, compiled when first asked for and cached on disk (a decorator).

    name: of one of several kernels that one function makes. Two processes may write to the cache at a time, so no two
    kernels may share a file there.
    """

    def decorate(work: Callable[[Any], None]) -> Callable[[], Kernel]:
        work.__qualname__ += name

        @cache
        def compiled() -> Kernel:
            return Kernel(cfunc(types.void(types.CPointer(numba.from_dtype(record))), cache=True)(versioned(work)))

        return compiled

    return decorate


def address_of(records: np.ndarray[Any, Any], index: int = 0) -> int:
    """Return the address of a record of an array, which must be kept as long as the address is used."""
    return int(records.ctypes.data) + index * records.itemsize


def int_fields(records: np.ndarray[Any, Any], first: str, last: str) -> NDArray[np.int64]:
    """Return [records, fields] the neighbouring integers of each record from `first` to `last`, which can be set all at
    once: looking up a field takes as long as setting it.
    """
    fields = records.dtype.fields
    assert fields is not None
    begin, end = fields[first][1], fields[last][1] + 8
    shape = len(records), (end - begin) // 8
    of: NDArray[np.int64] = np.ndarray(shape, np.int64, records, begin, (records.itemsize, 8))
    return of


_MONOTONIC = 1  # of clock_gettime
PROGRAM = np.dtype(
    [
        ("steps", "i8"),  # [count, 2]: addresses of a kernel and of its record
        ("count", "i8"),
        ("times", "i8"),  # [count + 1, 2] seconds and nanoseconds when each step began, and the last ended; or 0
    ]
)


@intrinsic(prefer_literal=True)
def run_step(context: Any, step: Any) -> Any:
    """Call the kernel of the step at that address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        record = ir.IntType(8).as_pointer()
        step = builder.inttoptr(args[0], ir.LiteralStructType([ir.IntType(64), record]).as_pointer())
        address, record = (builder.extract_value(builder.load(step), i) for i in range(2))
        kind = ir.FunctionType(ir.VoidType(), [record.type])
        builder.call(builder.inttoptr(address, kind.as_pointer()), [record])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@kernel(PROGRAM)
def _program_kernel(address: Any) -> None:
    work = carray(address, 1)[0]
    timed = work.times != 0 and thread_id() == 0
    for i in range(work.count):
        if timed:
            _clock_gettime(_MONOTONIC, work.times + 16 * i)
        run_step(work.steps + 16 * i)
        barrier()
    if timed:
        _clock_gettime(_MONOTONIC, work.times + 16 * work.count)


class Timed:
    """When the steps of a call began and the last ended. kernels: of all steps, the address of each and of its record;
    the call runs those from `start` to `end`.
    """

    def __init__(self, kernels: list[tuple[int, int]], start: int, end: int):
        self._kernels, self._start = kernels, start
        self.times = np.zeros((end - start + 1, 2), np.int64)

    def seconds(self) -> list[tuple[int, float]]:
        """Return the seconds of each step, after its kernel's address."""
        taken = np.diff(self.times @ [1_000_000_000, 1]) / 1e9
        steps = self._kernels[self._start : self._start + len(taken)]
        return [(address, took) for (address, _), took in zip(steps, taken.tolist(), strict=True)]


class Program:
    """Steps that run one after the other. Consecutive kernels between Python functions are one call."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], None] | None] = []
        self._kernels: list[tuple[int, int]] = []
        self._alone_below: list[int] = []
        self._stretches: dict[tuple[int, int], tuple[int, int]] = {}  # by start and stop
        self._table, self._table_at = np.zeros((0, 2), np.int64), 0
        self._work = np.zeros(1, PROGRAM)
        self._work_at, self._of_work = address_of(self._work), int_fields(self._work, "steps", "times")

    def __len__(self) -> int:
        return len(self._functions)

    def add(self, kernel: Kernel, record: int, alone_below: int = 0) -> None:
        """Add a kernel as the next step. With fewer rows than `alone_below` it is not worth waking other threads."""
        self._functions.append(None)
        self._kernels.append((kernel.address, record))
        self._alone_below.append(alone_below)

    def call(self, function: Callable[[], None]) -> None:
        """Add a function as the next step."""
        self._functions.append(function)
        self._kernels.append((0, 0))
        self._alone_below.append(0)

    def run(self, rows: int, start: int, stop: int, timed: list[Timed] | None = None) -> None:
        """Run the steps from `start` to `stop`. timed: gets a `Timed` for each stretch of kernels."""
        if len(self._table) != len(self):
            self._table = np.array(self._kernels, np.int64).reshape(-1, 2)
            self._table_at = int(self._table.ctypes.data)
        while start < stop:
            if (function := self._functions[start]) is not None:
                function()
                start += 1
                continue
            end, least = self._stretch(start, stop)
            clock = 0
            if timed is not None:
                timed.append(Timed(self._kernels, start, end))
                clock = int(timed[-1].times.ctypes.data)
            self._of_work[:] = self._table_at + self._table.itemsize * 2 * start, end - start, clock
            _program_kernel()(self._work_at, torch.get_num_threads() if rows >= least else 1)
            start = end

    def _stretch(self, start: int, stop: int) -> tuple[int, int]:
        """Return where the stretch of kernels from `start` ends, and the row count from which waking other threads
        pays.
        """
        if (found := self._stretches.get((start, stop))) is None:
            functions = (at for at in range(start, stop) if self._functions[at] is not None)
            end = next(functions, stop)
            found = self._stretches[start, stop] = end, min(self._alone_below[start:end])
        return found
