"""Functions that are compiled into kernels."""

from __future__ import annotations

from typing import Any

import pytest
from numba import cfunc, types
from numba.core.codegen import JITCodeLibrary

from engine.kernels.subroutine import subroutine


@subroutine
def squared(x: int) -> int:
    return x * x


@subroutine
def of_both(x: int, y: float) -> Any:
    return squared(x) + squared(y)


def test_compiled_code_calls_it_with_any_types() -> None:
    @cfunc(types.float64(types.int64, types.float64))
    def kernel(x: int, y: float) -> Any:
        return of_both(x, y) + of_both(3, y)

    assert kernel.ctypes(2, 0.5) == 4 + 0.25 + 9 + 0.25


def test_machine_code_is_emitted_for_the_function_that_calls_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted, emit = list[str](), JITCodeLibrary._finalize_specific

    def seen(library: Any) -> None:
        emitted.append(library.name)
        emit(library)

    @cfunc(types.int64(types.int64))
    def before(x: int) -> Any:  # what numba compiles for itself with the first function
        return x

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", seen)

    @cfunc(types.float64(types.int64, types.float64))
    def kernel(x: int, y: float) -> Any:
        return of_both(x, y)

    assert len(emitted) == 1 and emitted[0].endswith("kernel")


def test_python_runs_it_as_python() -> None:
    assert of_both(2, 3) == 13
