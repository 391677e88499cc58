"""How the kernels of this folder are compiled, once per machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from engine.kernels.jit_cache import versioned


def kernel(work: Callable[..., Any]) -> Any:
    """Decorator: compiled when first called, and cached on disk."""
    return njit(cache=True, error_model="numpy")(versioned(work))


def inlined(work: Callable[..., Any]) -> Any:
    """Decorator: a kernel that is inlined where it is called."""
    return njit(cache=True, error_model="numpy", inline="always")(versioned(work))
