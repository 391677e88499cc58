"""The command line as a user has it: its output and its exit code, of a process of its own where that decides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.frontend.supervisor import say_once
from tests.command import talon
from tests.conftest import free_port

ROOT = Path(__file__).parents[3]


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m engine ARGUMENTS`."""
    return subprocess.run(
        [sys.executable, "-m", "engine", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_generate_json_is_exactly_one_object(tiny_gguf: str) -> None:
    done = process("generate", "hi", "--set", f"model={tiny_gguf}", "--max-tokens", "5", "--json", "--method", "pld")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    asked_for = {"logprobs", "prompt_logprobs", "sources", "model", "method", "seed"}
    assert set(answer) == {"text", "token_ids", "prompt_tokens", "finish_reason", "stop_text", "metrics"} | asked_for
    assert set(answer["metrics"]) == {
        "mean_accepted_tokens", "rounds", "tokens_per_second", "time_to_first_token_s", "verifier_busy",
        "draft_hit_rate", "cached_tokens", "exact", "inexact", "activations", "kv_type", "weights",
        "speculative_decoding",
    }  # fmt: skip
    assert answer["metrics"]["exact"] and not answer["metrics"]["inexact"]
    assert (answer["model"], answer["method"], answer["seed"]) == (tiny_gguf, "pld", 0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", ""], "prompt: is empty"),
        (["generate", "hi", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "hi", "--method", "pldd"], "did you mean pld"),
        (["generate", "hi", "--set", "model=/no/such"], "model=/no/such"),
        (["generate", "hi", "--set", "dtype=int4"], "dtype='int4'"),
        (["generate", "hi", "--set", "drafter.budgt=3"], "did you mean drafter.budget"),
        (["generate", "hi", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["bench"], "--questions"),
        (["check", "--questions", "nowhere.jsonl"], "nowhere.jsonl"),
        (["bench", "--questions", "nowhere.jsonl", "--methods", "pldd"], "nowhere.jsonl"),
        (["bench", "--questions", "README.md", "--out", "README.md"], "--out README.md"),
        (["bench", "--questions", "nowhere.jsonl", "--against", "elsewhere"], "results=elsewhere"),
        (["report", "nowhere"], "nowhere"),
        (["report", "nowhere", "--against", "elsewhere"], "nowhere"),
        (["acceptance"], "--questions"),
        (["acceptance", "--questions", "README.md", "--methods", "pld,nobody"], "'nobody' drafts nothing"),
        (["index", "info", "nowhere"], "nowhere"),
        (["qa"], "--questions"),
        (["index", "query", ".", "half \udcff", "--tokenizer", "{tiny}"], "half a character"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny: str, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [argument.replace("{tiny}", tiny) for argument in arguments]
    if arguments[0] == "generate" and "--config" not in arguments:
        arguments = ["generate", "--set", f"model={tiny}", "--set", "transport=inproc", *arguments[1:]]
    done = talon(*arguments)
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.startswith("talon: ")
    assert done.stderr.count("\n") == 1


def test_a_hub_id_without_network_is_one_line_and_no_retries(tmp_path: Path) -> None:
    nobody = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(tmp_path)}
    done = process("generate", "hi", "--method", "none", "--set", "model=Some/Model-1B", **nobody)
    assert done.returncode == 2
    assert done.stderr.startswith("talon: model=Some/Model-1B: no such directory, not in the hub cache, and the hub")
    assert done.stderr.count("\n") == 1


def test_a_cached_hub_id_is_served_without_network(tiny: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--Some--Model-1B" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tiny, snapshot)
    (tmp_path / "hub" / "models--Some--Model-1B" / "refs").mkdir()
    (tmp_path / "hub" / "models--Some--Model-1B" / "refs" / "main").write_text(snapshot.name)
    nobody = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(tmp_path)}
    options = ["--method", "none", "--max-tokens", "4", "--set", "model=Some/Model-1B", "--set", "transport=inproc"]
    done = process("generate", "hi", *options, **nobody)
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr and "4 tokens" in done.stderr


def test_a_target_that_is_slower_and_not_exact_says_each_in_one_line_and_works(tiny: str) -> None:
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--set", "dtype=float16", "--max-tokens", "5"]
    say_once.cache_clear()
    done = talon("generate", "hi", *options, "--json", "--method", "pld")
    assert done.exit_code == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert not metrics["exact"] and metrics["inexact"] == "its type is float16"
    assert done.stderr.splitlines() == [
        f"talon: model={tiny}: runs transformers' own forward, which is slower than the lean decoder "
        "(its type is float16)",
        "talon: the target is not exact, so drafts may turn a near tie: its type is float16",
    ]
