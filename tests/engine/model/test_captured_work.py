"""What CUDA graphs capture of a target, on a device that has no memory: see `capture_work`. Of draft heads it is what
`tests.benchmarks.test_gpu_counts` traces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """By work; "" where there was none."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.model.capture_work"],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {one["name"]: one["error"] for one in map(json.loads, done.stdout.splitlines())}


def test_reading_a_result_or_mixing_devices_is_seen(errors: dict[str, str]) -> None:
    assert "DataDependentOutput" in errors["host sync"] and "DeviceMismatch" in errors["mixed devices"]


@pytest.mark.parametrize(("kind", "count"), [("target", 15), ("lean", 3), ("masked", 2)])
def test_captured_work_neither_waits_for_the_host_nor_mixes_devices(
    kind: str, count: int, errors: dict[str, str]
) -> None:
    found = {name: error for name, error in errors.items() if name.startswith(kind)}
    assert found == dict.fromkeys(found, "") and len(found) == count
