"""How much memory a process can take on this machine, or in its container, without swapping."""

from __future__ import annotations

import re
from pathlib import Path

_UNKNOWN = 4 << 30  # if Linux does not say
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""For both cgroup versions: the files of the limit and of the usage, and the entry for page cache not used lately."""


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes. The page cache counts as free, since Linux releases it when memory is needed."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else _UNKNOWN
    for limit, used, stat, name in _CGROUPS:
        most, taken = _text(cgroup / limit).strip(), _text(cgroup / used).strip()
        if most.isdecimal() and taken.isdecimal():
            cached = re.search(rf"^{name} (\d+)$", _text(cgroup / stat), re.MULTILINE)
            free = min(free, max(0, int(most) - int(taken) + (int(cached[1]) if cached else 0)))
    return free


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf8")
    except OSError:
        return ""
