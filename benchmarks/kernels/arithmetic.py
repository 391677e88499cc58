"""Measures how many multiply-adds a second the instructions of products reach here: a loop of nothing else, on all
threads.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.gemm.int8.dots import InstructionSet, instruction_sets
from engine.kernels.gemm.matmul import Unit, units
from engine.kernels.simd import features
from engine.kernels.threads import Kernel, address_of, kernel, num_threads

_SUMS = 12  # independent sums, so that no instruction waits for the one before
_LOOPS = 100_000
_WORD = ir.IntType(64)


class Loop(NamedTuple):
    """A loop of multiply-adds. lines: the instructions that add to the sums in register `{0}`, of the width `{1}`.
    adds: how many multiply-adds they do.
    """

    lines: tuple[str, ...]
    width: str
    adds: int


_DOT, _PAIRS = "vpdpbusd %{1}13, %{1}12, %{1}{0}", "vpmaddubsw %{1}13, %{1}12, %{1}14"
LOOPS = (
    Loop(("vdpbf16ps %{1}13, %{1}12, %{1}{0}",), "zmm", 32),
    Loop(("vfmadd231ps %{1}13, %{1}12, %{1}{0}",), "zmm", 16),
    Loop(("vfmadd231ps %{1}13, %{1}12, %{1}{0}",), "ymm", 8),
    Loop((_DOT,), "zmm", 64),
    Loop((_DOT,), "ymm", 32),
    Loop((_PAIRS, "vpmaddwd %{1}13, %{1}14, %{1}15", "vpaddd %{1}15, %{1}{0}, %{1}{0}"), "ymm", 32),
)
"""Loops for bfloat16, float32 in 512 and in 256 bits, and the three ways of integer products."""


def loop_of_type(dtype: torch.dtype) -> Loop | None:
    """Return the loop of the unit that multiplies that type; None if that is not a vector unit."""
    unit = next(iter(units(dtype)), None)
    if unit is Unit.VECTORS:
        return LOOPS[0]
    return LOOPS[1 if "+avx512f" in features() else 2] if unit is Unit.FMA else None


def loop_of_integers() -> Loop | None:
    return LOOPS[3 + list(InstructionSet).index(instruction_sets()[0])] if instruction_sets() else None


def multiply_adds_per_s(loop: Loop) -> float:
    """Return the multiply-adds a second on all of torch's threads."""
    record, threads = np.zeros(1, _RECORD), torch.get_num_threads()
    run = _kernel_of(LOOPS.index(loop))
    started = time.perf_counter()
    run(address_of(record), threads)
    seconds = time.perf_counter() - started
    return int(record["threads"][0]) * _LOOPS * _SUMS * loop.adds / seconds


_RECORD = np.dtype([("threads", "i8")])
_KERNELS: dict[int, Kernel] = {}


def _kernel_of(number: int) -> Kernel:
    if number not in _KERNELS:

        @kernel(_RECORD, str(number))
        def loop_kernel(address: Any) -> None:
            carray(address, 1)[0].threads = num_threads()
            _repeat(number)

        _KERNELS[number] = loop_kernel()
    return _KERNELS[number]


@intrinsic(prefer_literal=True)
def _repeat(context: Any, number: Any) -> Any:
    loop = LOOPS[number.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = [f"vpxor %xmm{i}, %xmm{i}, %xmm{i}" for i in range(16)]
        _emit(builder, zeros)
        adds = [line.format(i, loop.width) for i in range(_SUMS) for line in loop.lines]
        with cgutils.for_range(builder, _WORD(_LOOPS)):
            _emit(builder, adds)
        return context.get_dummy_value()

    return types.void(number), generate


def _emit(builder: ir.IRBuilder, lines: list[str]) -> None:
    touched = ",".join(f"~{{xmm{i}}}" for i in range(16))
    builder.asm(ir.FunctionType(ir.VoidType(), []), "\n".join(lines), touched, [], side_effect=True)
