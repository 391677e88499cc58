"""Checks every kernel by the instructions that it needs, on this processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.core.errors import first_line
from engine.kernels.attention.every_kernel import every_attention_kernel
from engine.kernels.gemm.int8.dots import InstructionSet, instruction_sets
from engine.kernels.gemm.int8.matmul import Int8Matmul
from engine.kernels.gemm.matmul import Matmul, Unit, units
from engine.kernels.quant.layouts import LAYOUTS

from ..report.tables import Table
from . import attention, products


class KernelCheck(NamedTuple):
    """The result of a kernel's check. difference: what is wrong with its results, "" if nothing is; None: this
    processor cannot run it.
    """

    kernel: str
    instructions: str
    difference: str | None


class _Case(NamedTuple):
    kernel: str
    instructions: str
    runs: bool
    difference: Callable[[], str]


def check_kernels(numbers: Sequence[int] | None = None) -> list[KernelCheck]:
    """Run all kernels that this processor can run, or those of these numbers in the list of all; the first time, they
    are compiled.
    """
    cases = [*_cases()]
    chosen = cases if numbers is None else [cases[number] for number in numbers]
    return [KernelCheck(case.kernel, case.instructions, _difference(case)) for case in chosen]


def instructions_of_kernels() -> list[str]:
    """Return what each kernel of the list of all needs."""
    return [case.instructions for case in _cases()]


def _difference(case: _Case) -> str | None:
    if not case.runs:
        return None
    try:
        return case.difference()
    except Exception as error:  # a compiler may raise anything
        return f"cannot be compiled ({first_line(error)})"


def kernel_table(checks: list[KernelCheck]) -> Table:
    def said(check: KernelCheck) -> str:
        if check.difference is None:
            return "not run: this processor does not have these instructions"
        return check.difference or "agrees"

    rows = [[check.kernel, check.instructions, said(check)] for check in checks]
    return Table("kernels against their definitions in float64", ("kernel", "instructions", "here"), rows, 3)


def counted(checks: list[KernelCheck]) -> str:
    ran = [check for check in checks if check.difference is not None]
    wrong = sum(bool(check.difference) for check in ran)
    return f"{len(ran)} of {len(checks)} kernels ran here, {wrong} differ"


def _cases() -> Iterator[_Case]:
    for kernel in every_attention_kernel():
        name = f"attention, {kernel.name}, {str(kernel.dtype).removeprefix('torch.')}"
        yield _Case(name, kernel.instructions, kernel.runs, partial(attention.difference, kernel))
    for unit in Unit:
        for dtype in (torch.bfloat16, *([] if unit.paired else [torch.float32])):
            name = f"product, {str(dtype).removeprefix('torch.')}"
            yield _Case(name, unit.title, unit in units(dtype), partial(_numbers, unit, dtype))
        for layout in LAYOUTS:
            if layout.coded:
                name = f"product, {layout.kind} by bfloat16"
                yield _Case(name, unit.title, unit in units(), partial(_codes, unit, layout.kind))
    for used in InstructionSet:
        for layout in LAYOUTS:
            if layout.coded:
                name, runs = f"product, {layout.kind} by int8", used in instruction_sets()
                yield _Case(name, used.title, runs, partial(_integers, used, layout.kind))


def _numbers(unit: Unit, dtype: torch.dtype) -> str:
    weight = torch.randn(products.OUTPUTS, products.INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    return products.difference(Matmul(weight, unit=unit), weight, dtype)


def _codes(unit: Unit, kind: str) -> str:
    matrix = products.random_matrix(kind)
    return products.difference(Matmul([matrix], unit=unit), matrix.values(torch.float32), torch.bfloat16)


def _integers(used: InstructionSet, kind: str) -> str:
    matrix = products.random_matrix(kind)
    product = Int8Matmul([matrix], dtype=torch.float32, instructions=used)
    return products.difference(product, matrix.values(torch.float32), torch.float32)
