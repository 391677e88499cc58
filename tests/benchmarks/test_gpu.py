"""The steps for a GPU, gone with small shapes on a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.gpu import __main__ as command

APP = typer.Typer()
APP.command()(command.main)


def gpu(out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and all records."""
    done = CliRunner().invoke(APP, ["--out", str(out), "--device", "cpu", *arguments])
    file = out / "gpu.jsonl"
    return done.exit_code, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_steps_say_what_they_found_and_that_they_ended(tmp_path: Path) -> None:
    code, records = gpu(tmp_path, "--steps", "card")
    assert code == 0, records
    assert [r["check"] for r in records if r.get("equal")] == [
        "toy graph, eager", "toy graph, captured", "toy graph, captured in a stream of its own"
    ]  # fmt: skip
    assert records[-1]["ended"] and "torch" in records[0]


def test_a_step_that_crashes_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.STEPS, "no_such_step", 60)
    code, records = gpu(tmp_path, "--steps", "no_such_step,card")
    assert code == 1
    crashed = next(r for r in records if r["step"] == "no_such_step")
    assert crashed["failed"] == "exit status 1" and "ModuleNotFoundError" in crashed["log"]
    assert records[-1]["step"] == "card" and records[-1]["ended"]


SLEEPER = """
import time

def run(device):
    yield {"check": "before"}
    fall_asleep()

def fall_asleep():
    time.sleep(60)
"""


def test_a_step_that_takes_too_long_is_ended_and_says_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    start = subprocess.Popen

    def with_sleeper(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """The step's process, to which `benchmarks.gpu.sleeper` is that file."""
        code = (
            f"import sys, benchmarks.gpu.step as step; sys.path.insert(0, {str(tmp_path)!r}); import sleeper;"
            "sys.modules['benchmarks.gpu.sleeper'] = sleeper; step.main()"
        )
        return start([arguments[0], "-c", code, *arguments[3:]], **options)

    monkeypatch.setattr(command.subprocess, "Popen", with_sleeper)
    monkeypatch.setitem(command.STEPS, "sleeper", 5)
    code, records = gpu(tmp_path, "--steps", "sleeper")
    assert code == 1
    assert records[0]["check"] == "before"
    assert records[-1]["failed"] == "no more time after 5 s"
    assert "in fall_asleep" in records[-1]["log"] and "sleeper.py" in records[-1]["log"]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["--out", str(tmp_path), "--steps", "card,kernel"])
    assert done.exit_code == 2
    assert done.output.startswith("talon: --steps: 'kernel' is no step; these are: card, kernels")


@pytest.mark.slow
def test_all_steps_run_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code, records = gpu(tmp_path)
    assert code == 0, [r for r in records if "failed" in r]
    assert {r["step"] for r in records if r.get("ended")} == set(command.STEPS)
