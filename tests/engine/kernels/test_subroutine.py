"""Functions that are compiled into kernels."""

from __future__ import annotations

from typing import Any

import pytest
from numba import cfunc, types
from numba.core.codegen import JITCodeLibrary

from engine.kernels.subroutine import subroutine


def sum_of_squares() -> Any:
    """Return a subroutine that calls another one, neither of which was compiled before."""

    @subroutine
    def squared(x: Any) -> Any:
        return x * x

    @subroutine
    def summed(x: int, y: float) -> Any:
        return squared(x) + squared(y)

    return summed


def test_compiled_code_calls_it_with_any_types() -> None:
    summed = sum_of_squares()

    @cfunc(types.float64(types.int64, types.float64))
    def kernel(x: int, y: float) -> Any:
        return summed(x, y) + summed(3, y)

    assert kernel.ctypes(2, 0.5) == 4 + 0.25 + 9 + 0.25


@pytest.mark.parametrize("step", ["_optimize_final_module", "_finalize_specific"])
def test_the_function_that_calls_it_is_optimised_and_emitted_alone(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, of_numba, summed = list[str](), getattr(JITCodeLibrary, step), sum_of_squares()

    def noted(library: Any) -> None:
        names.append(library.name)
        of_numba(library)

    @cfunc(types.int64(types.int64))
    def before(x: int) -> Any:  # what numba compiles for itself with the first function
        return x

    monkeypatch.setattr(JITCodeLibrary, step, noted)

    @cfunc(types.float64(types.int64, types.float64))
    def kernel(x: int, y: float) -> Any:
        return summed(x, y)

    assert len(names) == 1 and names[0].endswith("kernel")


def test_python_runs_it_as_python() -> None:
    assert sum_of_squares()(2, 3) == 13
