from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.core.processor import cores, cpus


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        ({0: ("0", "0"), 1: ("0", "1"), 2: ("0", "2")}, 3),
        ({0: ("0", "0,2"), 1: ("0", "1,3"), 2: ("0", "0,2"), 3: ("0", "1,3")}, 2),
        ({0: ("0", "0"), 1: ("0", "1"), 2: ("1", "2")}, 2),
        ({}, 4),
    ],
    ids=["one thread a core", "two threads a core", "two sockets", "a system that does not say"],
)
def test_threads_of_one_core_and_other_sockets_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: dict[int, tuple[str, str]], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(threads or range(4)), raising=False)
    for cpu, (socket, siblings) in threads.items():
        about = tmp_path / f"cpu{cpu}" / "topology"
        about.mkdir(parents=True)
        (about / "physical_package_id").write_text(socket)
        (about / "thread_siblings_list").write_text(siblings)
    assert cores(tmp_path) == expected
    assert cpus() == len(threads or range(4))
