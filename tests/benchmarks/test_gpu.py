"""The GPU benchmark's way, gone with toy models on a CPU. On a GPU it has not been run yet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.gpu import main

APP = typer.Typer()
APP.command()(main)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"count to {i}", "completion": "one two three " * 4} for i in range(12)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.mark.slow
def test_the_tiny_path_trains_benchmarks_and_times(tiny: str, data: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "test", "turns": ["count to 5"]}) + "\n")
    out = tmp_path / "out"
    done = CliRunner().invoke(
        APP,
        ["--tiny", "--data", str(data), "--questions", str(questions), "--out", str(out), "--minutes", "0.02",
         "--methods", "none,eagle3", "--limit", "1", "--max-tokens", "8", "--tokenizer", tiny],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {(row["method"], row["temperature"]) for row in rows} == {
        ("none", 0.0), ("none", 1.0), ("eagle3", 0.0), ("eagle3", 1.0)
    }  # fmt: skip
    assert all(row["output_equal"] or row["tie"] for row in rows)
    assert "random weights" in (out / "costs.txt").read_text()
    assert (out / "report.html").exists()


def test_data_without_completions_is_refused(tiny: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "hi"}\n')
    done = CliRunner().invoke(
        APP, ["--tiny", "--data", str(bad), "--questions", str(bad), "--out", str(tmp_path), "--tokenizer", tiny]
    )
    assert done.exit_code == 2 and 'line 1 needs a "prompt" and a "completion"' in done.output
