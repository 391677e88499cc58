"""What the user's process imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.core.child_environment import child_environment
from engine.weights.gguf.describe_process import describe
from engine.weights.gguf.file import read_gguf
from engine.weights.gguf.source import GgufSource
from tests.engine.weights.tiny_gguf import write_gguf

START = """
import asyncio, sys
from engine.api import Engine
from engine.core.params import SamplingParams

async def main():
    options = {"model": sys.argv[1], "verifier": {"kv_memory": 1 << 20}}
    async with await Engine.start(**options) as engine:
        result = await engine.generate("a 48", SamplingParams(max_tokens=4))
    print(len(result.token_ids), sorted({"torch", "transformers", "numba"} & set(sys.modules)))

asyncio.run(main())
"""


def test_a_front_end_of_a_described_model_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder, file = tmp_path / "described", tmp_path / "tiny.gguf"
    folder.mkdir()
    write_gguf(file)
    describe(read_gguf(file, "model=tiny"), folder, "tiny", "Made for a test.")
    GgufSource.of(file, str(file)).write(folder)
    environment = child_environment() | {"TALON_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, str(folder)]
    found = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert (found.stdout, found.returncode) == ("4 []\n", 0), found.stderr
