"""The command says the same as the API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.cli.options import bias_of, grammar_of, speculation_of
from engine.core.errors import RequestError
from engine.core.grammar import Grammar
from engine.core.params import Speculation
from tests.command import talon


def test_options_that_are_not_given_say_nothing() -> None:
    assert grammar_of(False, None, None, None) is None
    assert speculation_of(False, None) is None
    assert bias_of(None) == {}


def test_a_schema_or_a_grammar_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert grammar_of(False, f"@{file}", None, None) == Grammar(json_schema='{"type": "object"}')
    assert grammar_of(False, None, None, 'start: "a"') == Grammar(grammar='start: "a"')
    with pytest.raises(RequestError, match="--grammar @/no/such: cannot be read"):
        grammar_of(False, None, None, "@/no/such")


def test_bias_and_budget_are_read() -> None:
    assert bias_of(["42=-100", "7=0.5"]) == {42: -100.0, 7: 0.5}
    assert speculation_of(False, 8) == Speculation(budget=8)
    with pytest.raises(RequestError, match="--logit-bias 42: write ID=VALUE"):
        bias_of(["42"])


def test_generate_streams_the_text_and_sums_up_on_standard_error(tiny: str) -> None:
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--max-tokens", "5", "--method", "suffix"]
    streamed = talon("generate", "hi", *options, "--temperature", "1")
    whole = talon("generate", "hi", *options, "--temperature", "1", "--json")
    assert streamed.stdout == json.loads(whole.stdout)["text"] + "\n"
    assert "verifier busy" in streamed.stderr


def test_a_dash_reads_the_prompt_from_standard_input(tiny: str) -> None:
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--max-tokens", "5", "--method", "none", "--raw"]
    piped = talon("generate", "-", *options, standard_input="count to ten\n")
    assert piped.stdout == talon("generate", "count to ten\n", *options).stdout != ""


def test_the_command_answers_n_times_under_a_grammar_with_log_probabilities(tiny: str) -> None:
    done = talon(
        "generate", "the cat", "--set", f"model={tiny}", "--set", "transport=inproc", "--regex", "(cat|dog) [0-9]{3}",
        "-n", "2", "--temperature", "1", "--logprobs", "2", "--prompt-logprobs", "0", "--budget", "4", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2
    for answer in answers:
        assert answer["text"][:4] in ("cat ", "dog ") and answer["text"][4:].isdigit()
        assert [len(top) for _, _, top in answer["logprobs"]] == [2] * 7
        assert answer["prompt_logprobs"][0] is None
        assert answer["sources"] and answer["metrics"]["speculative_decoding"]["drafts"] >= 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--regex", "a", "--json-object"], "talon: grammar: json_object, regex given; give one of"),
        (["--presence-penalty", "3"], "talon: presence_penalty=3.0: use a number from -2 to 2"),
        (["--logprobs", "2"], "talon: --logprobs, --prompt-logprobs: are shown with --json; add it"),
        (["--budget", "1"], "talon: speculation.budget=1: use 2 nodes or more, or off=True"),
        (["--logit-bias", "x=1"], "talon: --logit-bias x=1: write ID=VALUE"),
    ],
)
def test_what_makes_no_sense_is_one_line(options: list[str], told: str) -> None:
    done = talon("generate", "hi", *options)
    assert done.exit_code == 2
    assert done.stderr.startswith(told) and done.stderr.count("\n") == 1
