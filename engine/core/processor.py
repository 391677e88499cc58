"""The processor's cores, as Linux describes them."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def cpus() -> int:
    """Return the number of logical processors that this process may run on."""
    return len(_allowed())


def cores(topology: Path = _TOPOLOGY) -> int:
    """Return the number of cores that this process may run on, of the socket that has most of them.

    A second thread of a core adds nothing where memory or the multipliers are the limit, and a second socket's memory
    is far away.
    """
    sockets: dict[str, set[str]] = defaultdict(set)
    for cpu in _allowed():
        about = topology / f"cpu{cpu}" / "topology"
        try:
            socket, core = ((about / name).read_text() for name in ("physical_package_id", "thread_siblings_list"))
        except OSError:  # another system, or one that does not say
            socket, core = "", str(cpu)
        sockets[socket].add(core)
    return max(len(found) for found in sockets.values())


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
