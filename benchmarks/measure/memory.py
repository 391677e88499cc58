"""The memory of processes, as Linux counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def peak_rss_mb(pid: int) -> float | None:
    """Return the peak resident memory of a process (shared libraries included), None where that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process and its children: what several of them share counts once."""
    total_kib, processes = 0, [pid]
    for process in processes:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total_kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                processes += map(int, children.read_text().split())
    return total_kib * 1024 / 1e6
