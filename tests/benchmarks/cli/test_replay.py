from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.cli.replay import methods, replay, replay_drafter, requests
from engine.core.drafter_protocol import Drafter
from engine.core.errors import ConfigError
from tests.conftest import tiny_tokenizer

ANSWER = "one two three, one two three, one two three."
APP = typer.Typer()
APP.command()(replay)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    row = {"question_id": 1, "turns": ["count", "again"], "answers": [ANSWER, ANSWER]}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    return path


def test_earlier_turns_are_part_of_the_prompt(trace: Path) -> None:
    tokenizer = tiny_tokenizer()
    first, second, third = requests(trace, tokenizer, limit=3)
    assert tokenizer.decode(first[0]) == tokenizer.decode(third[0]) == "USER: count ASSISTANT: "
    assert tokenizer.decode(second[0]) == f"USER: count ASSISTANT: {ANSWER} USER: again ASSISTANT: "
    assert tokenizer.decode(second[1]) == ANSWER


@pytest.mark.parametrize("name", sorted(methods(16)))
def test_repeating_answers_are_drafted_by_every_method(trace: Path, name: str) -> None:
    drafter: Drafter = methods(16)[name]()
    result = replay_drafter(drafter, list(requests(trace, tiny_tokenizer(), None)))
    assert 1.5 < result.mean_accepted_tokens <= 17
    assert result.query_us_p50 > 0 and result.append_us_p50 > 0


def test_the_command_prints_json(trace: Path, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = ["--trace", str(trace), "--tokenizer", str(tmp_path / "tokenizer"), "--methods", "pld,suffix"]
    result = CliRunner().invoke(APP, [*options, "--limit", "2", "--budget", "8", "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert set(printed) == {"pld", "suffix"}
    assert {"mean_accepted_tokens", "query_us_p50", "append_us_p50"} <= set(printed["suffix"])


def test_a_wrong_method_or_file_is_one_line(trace: Path, tmp_path: Path) -> None:
    for wrong in (["--trace", str(trace), "--methods", "magic"], ["--trace", str(tmp_path / "none.jsonl")]):
        result = CliRunner().invoke(APP, [*wrong, "--tokenizer", str(tmp_path)])
        assert result.exit_code == 2


def test_a_line_that_is_no_conversation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": 3}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(requests(path, tiny_tokenizer(), None))


def test_the_recorded_traces_give_what_was_promised(shared: Path) -> None:
    """A tenth of each trace: enough to see a mixture that has stopped learning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "tokenizers" / "llama2")
    path = shared / "data" / "eval" / "trace_vicuna7b_mt_bench.jsonl"
    answers = list(requests(path, tokenizer, 16))
    results = {name: replay_drafter(methods(16)[name](), answers) for name in ("pld", "suffix")}
    assert results["suffix"].mean_accepted_tokens > 1.15 * results["pld"].mean_accepted_tokens
    assert results["suffix"].expected_tokens == pytest.approx(results["suffix"].mean_accepted_tokens, rel=0.2)
