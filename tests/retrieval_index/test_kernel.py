"""Kernels that are compiled into each other from several files, and numba's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from retrieval_index.ngrams import kernel

INNER = """
from kernels.kernel import kernel

@kernel
def inner(x):
    return x + {}
"""
OUTER = """
from kernels.inner import inner
from kernels.kernel import kernel

@kernel
def outer(x):
    return inner(x)

print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def test_a_kernel_is_compiled_again_when_one_of_another_file_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    shutil.copy(kernel.__file__, folder)
    (folder / "outer.py").write_text(OUTER)

    def run(added: int) -> str:
        (folder / "inner.py").write_text(INNER.format(added))
        command = [sys.executable, "-c", "import kernels.outer"]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # bytecode is told by second and size, which stay
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    assert [run(1), run(1), run(2), run(2)] == ["2 0\n", "2 1\n", "3 0\n", "3 1\n"]
