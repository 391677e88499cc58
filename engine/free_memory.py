"""How much memory of this machine, or of the container, a process can take without swapping."""

from __future__ import annotations

import re
from pathlib import Path

_UNKNOWN = 4 << 30  # where Linux does not tell
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Of both versions: the files of the limit and of what is used, and what of that is page cache not used lately."""


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes. The page cache counts as free, as Linux gives it up when memory is needed."""
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
