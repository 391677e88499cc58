"""How the kernels of this folder are compiled, once per machine.

Numba's cache notices changes only of the file that defines a kernel; a kernel compiled into another one would stay
there as it was. So a kernel's name in the cache has the checksum of all files of this folder. From other folders only
functions of `engine.noise_bits` are compiled in, which may never change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from numba import njit


def kernel(work: Callable[..., Any]) -> Any:
    """Decorator: compiled when first called, and cached on disk."""
    return njit(cache=True, error_model="numpy")(_versioned(work))


def inlined(work: Callable[..., Any]) -> Any:
    """Decorator: a kernel that is inlined where it is called."""
    return njit(cache=True, error_model="numpy", inline="always")(_versioned(work))


def _versioned(work: Callable[..., Any]) -> Callable[..., Any]:
    work.__qualname__ += f"_{_sources():x}"
    return work


@cache
def _sources() -> int:
    return crc32(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))
