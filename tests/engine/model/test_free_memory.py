from __future__ import annotations

from pathlib import Path

import pytest

from engine.model.free_memory import free_memory

MEMINFO = (
    "MemTotal:       24684000 kB\nMemFree:          300000 kB\nMemAvailable:   20000000 kB\nCached:  19000000 kB\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def test_the_page_cache_counts_as_free(machine: Path) -> None:
    assert free_memory(machine, machine / "none") == 20_000_000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "anon 200\ninactive_file 100\n"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "inactive_file 7\ntotal_inactive_file 100\n"),
    ],
)
def test_a_container_has_what_its_limit_leaves(machine: Path, limit: str, used: str, stat: str) -> None:
    (machine / "memory").mkdir()
    (machine / limit).write_text("2000\n")
    (machine / used).write_text("300\n")
    (machine / limit).with_name("memory.stat").write_text(stat)
    assert free_memory(machine, machine) == 2000 - 300 + 100


def test_a_container_without_a_limit_has_what_the_machine_has(machine: Path) -> None:
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("300\n")
    assert free_memory(machine, machine) == 20_000_000 * 1024


def test_where_nobody_tells_it_is_a_guess(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) == 4 << 30
