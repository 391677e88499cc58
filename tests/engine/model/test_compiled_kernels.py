"""The Triton kernels, compiled for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: CUDA builds of torch bring it, or pip install triton")

_LEAST_SHARED = 99 << 10  # bytes that a program may use on every GPU from compute capability 8.0 on


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile some shapes for the newest capability and fewer for the older, or all for both."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.model.compile_kernels", request.param],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_shape_compiles_for_compute_capability_8_and_9(kernels: list[dict[str, Any]]) -> None:
    compiled = {(one["name"], one["dtype"], one["capability"], one["kernel"]) for one in kernels}
    some, every = 5 * 2 + 2 * 17 + 2 * 2 + 17, 2 * (7 * 2 + 2 * 17)
    assert len(compiled) == len(kernels) in (some, every)
    assert {one["capability"] for one in kernels} == {80, 90}
    assert max(one["shared"] for one in kernels) <= _LEAST_SHARED


def test_no_kernel_in_bfloat16_spills_registers(kernels: list[dict[str, Any]]) -> None:
    assert [one for one in kernels if one["spills"] and one["dtype"] == "torch.bfloat16"] == []


def test_two_programs_of_attention_fit_on_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    """One that waits for memory leaves it to the other."""
    attention = [one for one in kernels if one["kernel"].startswith("_attend") and one["dtype"] == "torch.bfloat16"]
    assert max(one["registers"] * one["threads"] for one in attention) <= 65536 // 2
