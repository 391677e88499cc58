"""Release the kernels' compiler: 60 MB of code in every worker that uses an index, useless once the
kernels are loaded.
"""

from __future__ import annotations

import ctypes
import sys

_MADV_DONTNEED = 4


def release_compiler() -> None:
    """Drop the compiler's code from this process's memory. If another kernel has to be compiled, the pages are read
    back from the file. Outside Linux this does nothing.
    """
    if sys.platform != "linux" or "llvmlite" not in sys.modules:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        places = [line.split()[0] for line in maps if "libllvmlite" in line and " r-xp " in line]
    for place in places:  # code only: pages that are never written lose nothing
        first, last = (int(address, 16) for address in place.split("-"))
        advise(first, last - first, _MADV_DONTNEED)
