"""The memory of processes that are real."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.measure.memory import peak_rss_mb, pss_mb

MB = 1 << 20
HOLD = f"held = bytearray(b'x') * (64 * {MB})\n"
TELL = "print('held', flush=True)\nsys.stdin.read()\n"
CHILD = f"import sys\n{HOLD}{TELL}"
PARENT = f"""
import subprocess, sys
{HOLD}
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
{TELL}
"""


def test_the_memory_of_a_process_is_counted_with_that_of_its_children() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        whole, peak = pss_mb(process.pid), peak_rss_mb(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert 2 * 64 * MB / 1e6 < whole < 2 * 64 * MB / 1e6 + 60
    assert peak is not None and 64 < peak < 64 + 40, "of the process alone"
    assert pss_mb(process.pid) == 0 and peak_rss_mb(process.pid) is None, "it has ended"


def test_what_two_processes_share_counts_once() -> None:
    held = bytearray(b"x") * (64 * MB)
    reading, writing = os.pipe()
    before = pss_mb(os.getpid())
    if not (child := os.fork()):
        os.read(reading, 1)
        os._exit(0)
    together = pss_mb(os.getpid())
    os.write(writing, b"x")
    os.waitpid(child, 0)
    assert len(held) == 64 * MB and together == pytest.approx(before, abs=40)
