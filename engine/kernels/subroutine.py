"""Functions that are compiled into kernels.

numba optimises each compiled function together with all that it calls, emits machine code for that, and wraps it for
Python. A kernel needs this once, for itself. So numba only translates a subroutine, and compiles the translation into
each kernel that calls it. Attention then compiles in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.registry import CPUDispatcher


class _NoEnvironments:
    """Takes the Python objects of a compiled function, which numba wants to store with its machine code. Printing and
    errors with values made at run time would read them: no subroutine may do either.
    """

    def set_env(self, name: str, environment: Any) -> None:
        return


class _Library(JITCodeLibrary):
    """The translation of a subroutine and of those that it calls. Machine code is not emitted."""

    codegen = _NoEnvironments()

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0, which stands for none, after linking what is called."""
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        return

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _Compiler(CompilerBase):
    def define_pipelines(self) -> list[Any]:
        state = self.state
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


class _Subroutine(CPUDispatcher):
    def __call__(self, *args: Any) -> Any:
        """Run the function as Python, whose whole numbers do not wrap around."""
        return self.py_func(*args)


def subroutine(work: Callable[..., Any]) -> Any:
    """Compile a function into each kernel that calls it (a decorator). As in numpy, dividing by zero is no error."""
    options = {"nopython": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _Subroutine(work, targetoptions=options, pipeline_class=_Compiler)
