"""Compiled functions in numba's cache on disk.

The cache notices changes only of the file that defines a function. A function of another file that is compiled into it
would stay there as it was, also after an update. So the name in the cache has the checksum of all files that numba
compiles anything of: those that import it, or decorate with one of our own decorators.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import llvmlite.binding as llvm
from numba.core import event

_PACKAGES = ("engine", "drafters", "retrieval_index")
_COMPILED = re.compile(rb"numba|^@(?:kernel|inlined)\b", re.MULTILINE)


def versioned(work: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator, below numba's: names the function by the version of all compiled sources."""
    work.__qualname__ += f"_{_sources():x}"
    return work


@cache
def _sources() -> int:
    root = Path(__file__).parents[2]
    contents = (file.read_bytes() for package in _PACKAGES for file in sorted((root / package).rglob("*.py")))
    return crc32(b"".join(content for content in contents if _COMPILED.search(content)))


def machine_code() -> str:
    """What decides the machine code of our kernels: their sources, their compiler, and the processor."""
    compiler = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    features = sorted(llvm.get_host_cpu_features().items())
    return f"{_sources():x} {compiler} {llvm.get_host_cpu_name()} {features}"


def on_first_compilation(tell: Callable[[], None]) -> None:
    """Call `tell` once, when something is compiled that no earlier process has left in the cache."""

    class First(event.Listener):
        def on_start(self, event_: event.Event) -> None:
            event.unregister("numba:compile", self)
            tell()

        def on_end(self, event_: event.Event) -> None:
            pass

    event.register("numba:compile", First())
