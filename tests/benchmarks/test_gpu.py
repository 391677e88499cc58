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


def gpu(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(APP, [*arguments])
    return done.exit_code, done.output


@pytest.mark.slow
def test_a_checkpoint_is_checked_measured_and_reported(tiny: str, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, told = gpu(
        "--model", tiny, "--questions", str(questions), "--out", str(out), "--minutes", "0.01", "--max-tokens", "8",
        "--methods", "none,pld", "--served", "pld,eagle3", "--at-once", "1,2",
    )  # fmt: skip
    assert code == 0, told
    assert "left out: eagle3" in told
    assert "| pld | async | inproc | auto | none | 0 | 2 |" in (out / "check.txt").read_text()
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {(row["method"], row["temperature"]) for row in rows} == {
        ("none", 0.0), ("none", 1.0), ("pld", 0.0), ("pld", 1.0)
    }  # fmt: skip
    assert "random weights" in (out / "costs.txt").read_text()
    assert "Many requests" in (out / "report.md").read_text()


@pytest.mark.slow
def test_heads_are_trained_first(tiny: str, questions: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(12)))
    code, told = gpu(
        "--model", tiny, "--questions", str(questions), "--out", str(out), "--minutes", "0.01", "--max-tokens", "8",
        "--methods", "none,eagle3", "--served", "eagle3", "--at-once", "1", "--data", str(data), "--train", "eagle3",
        "--prompts", "8", "--steps", "2",
    )  # fmt: skip
    assert code == 0, told
    assert "left out" not in told and (out / "heads" / "eagle3" / "config.json").exists()


def test_two_files_of_one_name_are_one_line(tmp_path: Path) -> None:
    code, told = gpu("--model", "/no/such", "--questions", "a/dev.jsonl", "--questions", "b/dev.jsonl")
    assert code == 2 and told.startswith("talon: --questions: a/dev.jsonl and b/dev.jsonl would both be")


def test_a_model_that_is_not_there_is_one_line(questions: Path, tmp_path: Path) -> None:
    code, told = gpu("--model", "/no/such", "--questions", str(questions), "--out", str(tmp_path))
    assert code == 2 and told.splitlines()[-1].startswith("talon: model=/no/such")
