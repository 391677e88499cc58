from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os

import numba
from retrieval_index.compiler import release_compiler


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


release_compiler()
assert numba.njit(lambda x: x + 1)(1) == 2
before = resident_bytes()
release_compiler()
print(before - resident_bytes())
assert numba.njit(lambda x: x + 2)(1) == 3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is released")
def test_the_compilers_code_leaves_memory_and_comes_back_when_it_is_needed() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20e6
