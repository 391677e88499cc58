"""The compiler of the kernels: 60 MB of code, of no use once they are loaded, in every worker that uses an index."""

from __future__ import annotations

import ctypes
import sys

_MADV_DONTNEED = 4


def release_compiler() -> None:
    """Let the compiler's code go out of this process's memory. The file still has it: should another kernel have to be
    compiled, its pages come back as they are used. Elsewhere than on Linux nothing happens."""
    if sys.platform != "linux" or "llvmlite" not in sys.modules:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        places = [line.split()[0] for line in maps if "libllvmlite" in line and " r-xp " in line]
    for place in places:  # code only: pages that are never written lose nothing
        first, last = (int(address, 16) for address in place.split("-"))
        advise(first, last - first, _MADV_DONTNEED)
