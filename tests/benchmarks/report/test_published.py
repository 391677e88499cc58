"""Which of the published processors a machine is most like."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report.published import PUBLISHED, most_like
from engine.kernels.gemm.matmul import Unit

ROOT = Path(__file__).parents[3]


def test_each_published_machine_is_a_section_of_the_figures() -> None:
    sections = (ROOT / "docs" / "benchmarks.md").read_text("utf8").splitlines()
    assert all(f"## {machine.name}" in sections for machine in PUBLISHED)


@pytest.mark.parametrize("unit", Unit)
def test_a_machine_is_compared_with_one_that_multiplies_alike(unit: Unit) -> None:
    told = most_like(unit, 16, 71.3)
    [machine] = [one for one in PUBLISHED if one.unit is unit]
    assert f'"{machine.name}"' in told and "(16 cores, reading 71 GB/s)" in told
    assert f"{machine.cores} cores, reading {machine.gb_per_s:.0f} GB/s" in told.partition("which has")[2]
