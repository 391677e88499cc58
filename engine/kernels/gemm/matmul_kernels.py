"""What the kernels of matrix products share: the record of a product and of its parts, a thread's panels of a part, and
the output. See `matmul`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

from engine.kernels.exponential import exp
from engine.kernels.jit_cache import versioned
from engine.kernels.simd import (
    FLOAT32,
    LANES,
    add,
    divide,
    float_at,
    load,
    multiply,
    pointer,
    put_number,
    put_numbers,
    splat,
    store,
)
from engine.kernels.subroutine import subroutine
from engine.kernels.threads import kernel, num_threads, thread_id

MATMUL = np.dtype(
    [
        (name, "i8")
        for name in (
            "rows",
            "tiles",  # AMX: configuration for min(rows, 16) rows
            "x",  # [rows, inputs]
            "parts",  # [count] PART
            "count",
            "scratch",  # [shared_bytes] for all threads, then [threads, scratch_bytes]: where codes are unpacked, or
            "shared_bytes",  # rows widened or rounded. Then gates
            "scratch_bytes",
            "bias",  # [panels * 16] float32, or 0
            "out",  # [rows, outputs]; gated: [rows, outputs / 2]
            "width",  # bytes of a number of x and out
            "inputs",  # a multiple of 32
            "outputs",
            "gated",  # 1: panels of gate and up alternate, and the result is silu(gate) * up
            "gate_bytes",  # gated, but the whole gate is a part, and up the next: of [rows, outputs / 2] float32, or 0
        )
    ]
)
PART = np.dtype(
    [
        (name, "i8")
        for name in (
            "kernel",  # address of the function that multiplies it
            "number_sums",  # without AMX: address of the function that multiplies panels of numbers
            "weights",  # [panels, panel_bytes]: tiles of `engine.kernels.quant.layouts`, or [steps, 32, 16] float32
            "panel_bytes",
            "first",  # of all panels of the product
            "panels",
        )
    ]
)
"""Neighbouring panels of a matrix that have one layout."""
_PART_BYTES = PART.itemsize


class PartKernel:
    """A compiled function of a MATMUL record and of one of its parts."""

    def __init__(self, compiled: Any):
        self._compiled = compiled  # its code is freed with it
        self.address: int = compiled.address


def part_kernel(name: str) -> Callable[[Callable[[Any, Any], None]], PartKernel]:
    """Decorator: `work(address of a MATMUL record, address of a PART)`, compiled now and cached on disk. name: of one
    of several that one function makes.
    """

    def decorate(work: Callable[[Any, Any], None]) -> PartKernel:
        work.__qualname__ += name
        records = (types.CPointer(numba.from_dtype(record)) for record in (MATMUL, PART))
        return PartKernel(cfunc(types.void(*records), cache=True)(versioned(work)))

    return decorate


@intrinsic
def _multiply(context: Any, work: Any, part: Any) -> Any:
    """Call the kernel of the PART at that address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        record = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [record, record])
        word = ir.IntType(64)
        function = builder.inttoptr(builder.load(pointer(builder, args[1], word)), kind.as_pointer())
        builder.call(function, [builder.bitcast(args[0], record), builder.inttoptr(args[1], record)])
        return context.get_dummy_value()

    return types.void(work, types.int64), generate


@kernel(MATMUL)
def product_kernel(address: Any) -> None:
    """Multiply all parts, one after the other."""
    work = carray(address, 1)[0]
    for i in range(work.count):
        _multiply(address, work.parts + i * _PART_BYTES)


@subroutine
def own_panels(work: Any, part: Any) -> Any:
    """Return where this thread's panels of a part begin and end. A gate panel and its up panel are never separated."""
    together = 2 if work.gated != 0 and work.gate_bytes == 0 else 1
    first = 0 if work.gate_bytes != 0 else part.first // together
    begin, end = share_of(part.panels // together, first, thread_id(), num_threads())
    return begin * together, end * together


@subroutine
def share_of(units: int, before: int, thread: int, threads: int) -> tuple[int, int]:
    """Return where a thread's share of a part's units begins and ends. before: the units of the parts before it. Where
    these left some threads one unit less than others, the next units that are over go to them: of all parts together,
    no thread has more than one unit more than another.
    """
    least, over = units // threads, units % threads
    first = before % threads  # of the threads that have one more; they go on from thread 0 after the last

    def more(below: int) -> int:
        return min(max(below - first, 0), over) + min(below, max(first + over - threads, 0))

    return thread * least + more(thread), (thread + 1) * least + more(thread + 1)


@intrinsic
def call_sums(
    context: Any, function: Any, rows: Any, x: Any, stride: Any, weights: Any, panels: Any, steps: Any, scratch: Any
) -> Any:
    """Call the function of a PART's `number_sums`, which is compiled once for all layouts. panels: how far apart two
    panels are, or how many there are, as it wants.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@subroutine
def put_sums(
    work: Any, first: int, rows: int, panel: int, width: int, scratch: int, row_bytes: int, apart: int
) -> None:
    """Write the sums in `scratch` plus the bias to the output. A row's 16 sums with a panel are `row_bytes` after those
    of the row before, and `apart` bytes after those with the panel before.
    """
    for row in range(first, first + rows):
        for i in range(width):
            column, sums = (panel + i) * LANES, scratch + i * apart
            x = _biased(work, sums, column)
            if work.gate_bytes != 0:
                _put_in_turn(work, x, row, column)
            elif work.gated != 0:
                if i % 2 == 0:
                    x = multiply(_swish(x), _biased(work, sums + apart, column + LANES))
                    put_numbers(x, work.out + (row * work.outputs + column) // 2 * work.width, work.width)
            elif column + LANES <= work.outputs:
                put_numbers(x, work.out + (row * work.outputs + column) * work.width, work.width)
            else:
                store(x, sums, FLOAT32)
                for lane in range(work.outputs - column):
                    place = work.out + (row * work.outputs + column + lane) * work.width
                    put_number(place, float_at(sums + 4 * lane), work.width)
        scratch += row_bytes


@subroutine
def _put_in_turn(work: Any, x: Any, row: int, column: int) -> None:
    """Keep a row's sums with a panel of the gate, or write those with a panel of up, by the thread that kept those of
    the gate.
    """
    half = work.outputs // 2
    place = row * half + column % half
    gate = work.scratch + work.shared_bytes + num_threads() * work.scratch_bytes + 4 * place
    if column < half:
        store(x, gate, FLOAT32)
    else:
        put_numbers(multiply(_swish(load(gate, FLOAT32)), x), work.out + place * work.width, work.width)


@subroutine
def _swish(x: Any) -> Any:
    return divide(x, add(splat(np.float32(1)), exp(multiply(x, splat(np.float32(-1))))))


@subroutine
def _biased(work: Any, sums: int, column: int) -> Any:
    x = load(sums, FLOAT32)
    if work.bias != 0:
        x = add(x, load(work.bias + 4 * column, FLOAT32))
    return x
