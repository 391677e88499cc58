"""The command's ends: interrupted, and on a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.command import command, talon
from tests.conftest import save_tiny_llama

ROOT = Path(__file__).parents[3]


def restore_interrupt() -> None:
    """A shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


PRINT = """
import sys, typer
from engine import __main__
from engine.cli import main
app = typer.Typer()
app.command()(lambda: [print(chr(960), file=stream) for stream in (sys.stdout, sys.stderr)])
main.assemble = lambda: app
sys.argv = ["talon"]
__main__.main()
"""
"""The `talon` command in which a command that prints a letter stands for all."""
WHILE = ["pydantic", "torch", "transformers.utils.generic"]
WHILE += [pytest.param(name, marks=pytest.mark.slow) for name in ("typer", "zmq", "numpy", "engine.cli.main")]


@pytest.mark.parametrize("imported", WHILE)
def test_an_interrupt_while_it_imports_ends_it_without_a_traceback(tmp_path: Path, imported: str) -> None:
    model = save_tiny_llama(tmp_path)  # which the front end reads with libraries of models
    command = [sys.executable, "-X", "importtime", "-m", "engine", "generate", "hi", "--set", f"model={model}"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore_interrupt
    )
    assert process.stderr is not None
    try:
        while (line := process.stderr.readline()).split("|")[-1].strip() != imported:
            assert line, f"ended before it had imported {imported}"
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert not [line for line in rest.splitlines() if line and not line.startswith("import time:")]


@pytest.fixture
def bench(tiny: str, tmp_path: Path) -> list[str]:
    """A benchmark that writes into the folder `out`."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "test", "turns": ["count"]}) + "\n")
    (tmp_path / "out").mkdir()
    options = ["--methods", "none", "--max-tokens", "8", "--set", f"model={tiny}", "--set", "transport=inproc"]
    return ["bench", "--questions", str(questions), "--out", str(tmp_path / "out"), *options]


@pytest.mark.parametrize("file", ["about.txt", "report.md", "headline.png", "results.jsonl"])
def test_a_disk_that_fills_during_a_benchmark_is_one_line(bench: list[str], tmp_path: Path, file: str) -> None:
    (tmp_path / "out" / file).symlink_to("/dev/full")
    if file == "results.jsonl":  # which is still open when the process ends
        command, environment = [sys.executable, "-m", "engine", *bench], os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        code, said = ended.returncode, ended.stderr
    else:
        done = talon(*bench)
        code, said = done.exit_code, done.stderr
    assert code == 2 and "Traceback" not in said, said
    told = f"talon: --out {tmp_path / 'out'}: the disk is full"
    assert [line for line in said.splitlines() if line.startswith(told)]


def test_an_answer_that_cannot_be_printed_is_one_line(tiny: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "engine", "generate", "hi", "--method", "none", "--max-tokens", "4", "--set",
             f"model={tiny}", "--set", "transport=inproc"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "talon: output: the disk is full: make room and run again\n"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"\\u03c0"), ("latin-1", b"\\u03c0"), ("utf-8", "π".encode())]
)
def test_a_character_that_the_output_lacks_is_shown_by_its_number(encoding: str, shown: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT], cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, shown + b"\n", shown + b"\n")


WRONG = [
    ["--method", "nope", "--set", "model=/nowhere"],
    ["--method", "hybrid", "--set", "drafter.path=/nowhere/{method}"],
    ["--method", "eagle3", "--set", "drafter.path=null"],
    ["--method", "datastore"],
    ["--set", "drafter.answers=/nowhere"],
    ["--regex", "("],
    ["--set", "drafter.bugdet=3"],
    ["--set", "model=/nowhere"],
    ["--method", "eagle3", "--set", "drafter.path=/nowhere"],
    ["--set", "verifier.draft_timeout_s=.inf"],
    ["--set", "transport=tcp"],
    ["--temperature", "-1"],
]
RUN = """
import contextlib, io, json, sys
from engine.cli.main import assemble
talon, told = assemble(), []
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            talon(arguments, prog_name="talon")
        except SystemExit as ended:
            code = ended.code
    loaded = [name for name in ("torch", "transformers", "numba") if name in sys.modules]
    told.append({"code": code, "lines": err.getvalue().splitlines(), "loaded": loaded})
print(json.dumps(told))
"""


def run(*commands: list[str]) -> list[dict[str, Any]]:
    """What comes of each command, one after the other in one new process: its exit code, the lines of standard error,
    and the libraries of models that are loaded then.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, input=json.dumps(commands), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def test_help_and_a_wrong_option_are_told_before_any_library_of_models_is_loaded() -> None:
    helped, *refused = run(["--help"], *(["generate", "hi", *wrong] for wrong in WRONG))
    assert helped == {"code": 0, "lines": [], "loaded": []}
    for wrong, told in zip(WRONG, refused, strict=True):
        assert (told["code"], len(told["lines"]), told["loaded"]) == (2, 1, []), (wrong, told)


def test_no_answers_at_all_are_refused_before_the_model_is_looked_for() -> None:
    done = CliRunner().invoke(command(), ["generate", "hi", "-n", "0", "--set", "model=/nowhere"])
    assert done.exit_code == 2 and "/nowhere" not in done.output


def test_standard_input_that_is_no_text_is_one_line(tiny: str) -> None:
    done = CliRunner().invoke(command(), ["generate", "-", "--set", f"model={tiny}"], input=b"\xff")
    assert done.exit_code == 2
    assert done.stderr == "talon: prompt: standard input is no text in utf-8; convert it\n"
