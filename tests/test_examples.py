"""The examples, run as their first lines say; those that need nothing of a process of their own are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafters.registry import build
from engine import Engine, SamplingParams
from engine.config import load
from engine.model.target import Target
from examples.speculative_loop import speculate
from tests.engine.server.process import ROOT, ServerProcess, serving
from tests.engine.server.tool_model import save_tool_model
from tests.forked_process import run_forked

DEMO = "configs/demo.yaml"
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def demo(smollm2: str) -> Iterator[ServerProcess]:
    with serving("--config", DEMO) as running:
        yield running


def example(name: str, *arguments: str) -> str:
    command = [sys.executable, f"examples/{name}.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def forked_example(name: str, *arguments: str) -> str:
    """Run an example in a fork of a process that has imported the engine."""
    done = run_forked(RUN, f"examples/{name}.py", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_client(demo: ServerProcess) -> None:
    *_, person = example("openai_client", demo.url).strip().splitlines()
    assert set(json.loads(person)) == {"name", "age"}


def test_an_agent_calls_tools_and_answers(tmp_path: Path) -> None:
    model = save_tool_model(tmp_path)
    with serving("--set", f"model={model}", "--served-model-name", "tiny", "--method", "pld") as server:
        lines = example("agent", server.url, "What is 3 + 4?").splitlines()
    assert any(line.startswith(("add(", "roll(")) and " = " in line for line in lines)


def test_a_stream_with_httpx(demo: ServerProcess) -> None:
    text, counted = example("stream_with_httpx", demo.url).strip().rsplit("\n", 1)
    assert text and counted.endswith("rounds")


@pytest.fixture
def light(tmp_path: Path, smollm2: str) -> str:
    """With one thread: of these examples' concern is not how fast they are."""
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {smollm2}\nmethod: suffix\nverifier: {{threads: 1}}\n")
    return str(file)


def test_a_batch_over_a_file(tmp_path: Path, light: str) -> None:
    prompts = ["What is 3 + 4?", "Say hello.", "Count to ten."]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    forked_example("batch_over_a_file", str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers.jsonl"), light)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == prompts and all(row["answer"] for row in rows)


def test_killed_workers_change_no_text(light: str) -> None:
    lines = example("kill_the_workers", light).splitlines()
    assert "--- kill -9 of every worker ---" in lines
    assert lines[-1].startswith("--- the same text as without: ")


def test_the_speculative_loop(light: str) -> None:
    assert "cat" in forked_example("speculative_loop", light)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["pld", "suffix", "recycling"])
async def test_the_speculative_loop_gives_the_engines_text(tiny: str, method: str, temperature: float) -> None:
    prompt, sampling = (
        list(b"the cat sat on the mat, the cat"),
        SamplingParams(max_tokens=48, temperature=temperature, seed=3),
    )
    config = load({"model": tiny, "method": method})
    async with await Engine.start(config, transport="inproc") as engine:
        expected = await engine.generate(prompt, sampling)
    assert speculate(Target.load(tiny), build(config), prompt, sampling) == expected.token_ids


def test_a_drafter_of_your_own(light: str) -> None:
    plain, drafted, *_, last = forked_example("own_drafter", light).strip().splitlines()
    assert plain == "none: 1.00 tokens a round"
    assert float(drafted.split()[1]) > 1
    assert last == "the same text: True"
