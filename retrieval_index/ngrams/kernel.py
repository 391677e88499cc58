"""Compiles the kernels of this folder, once per machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from engine.kernels.jit_cache import versioned


def kernel(work: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, and cache it on disk (a decorator)."""
    return njit(cache=True, error_model="numpy")(versioned(work))
