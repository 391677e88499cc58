from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine import Engine, SamplingParams
from engine.cli.main import assemble
from engine.core.errors import ConfigError
from engine.files.answer_rows import open_answers
from engine.files.prompt_file import read_prompts
from engine.weights.tokenizer import load_tokenizer
from retrieval_index.build import build
from retrieval_index.datastore import Datastore

PROMPTS = ["the cat sat", "1 + 1 =", "the mat"]
SAMPLED = ["--temperature", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in [*PROMPTS, PROMPTS[0]]))
    return path


def answer(tiny: str, prompts: Path, out: Path, *more: str) -> str:
    options = ["--prompts", str(prompts), "--out", str(out), "--set", f"model={tiny}", "--set", "transport=inproc"]
    done = CliRunner().invoke(assemble(), ["answer", *options, "--max-tokens", "6", *more])
    assert done.exit_code == 0, done.output
    return done.output


def rows(out: Path) -> dict[str, dict[str, Any]]:
    return {row["prompt"]: row for row in map(json.loads, out.read_text().splitlines())}


@pytest.fixture(scope="module")
def answered(tiny: str, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answer all prompts."""
    out = tmp_path_factory.mktemp("answers") / "new" / "answers.jsonl"
    assert "3 of 3 prompts answered" in answer(tiny, prompts, out, *SAMPLED)
    return out


@pytest.fixture
def answers(answered: Path, tmp_path: Path) -> Path:
    """Copy the answers, for a test that changes them."""
    return Path(shutil.copy(answered, tmp_path))


async def test_every_prompt_gets_the_answer_that_it_gets_alone(tiny: str, answers: Path) -> None:
    assert set(rows(answers)) == set(PROMPTS)
    async with await Engine.start({"model": tiny, "method": "none", "transport": "inproc"}) as engine:
        for prompt, row in rows(answers).items():
            result = await engine.generate(prompt, SamplingParams(max_tokens=6, temperature=1.0, seed=3))
            assert (row["tokens"], row["text"]) == (result.token_ids, result.text)


def test_a_second_run_asks_only_what_the_first_did_not_finish(tiny: str, prompts: Path, answers: Path) -> None:
    lines = answers.read_bytes().splitlines(True)
    marked = lines[1].replace(b'"finish_reason":"length"', b'"finish_reason":"kept"')
    assert marked != lines[1]
    answers.write_bytes(marked + lines[2][:20])  # killed in the middle of a line
    answer(tiny, prompts, answers, *SAMPLED)
    assert len(answers.read_bytes().splitlines()) == 3 and set(rows(answers)) == set(PROMPTS)
    assert [row["finish_reason"] for row in rows(answers).values()].count("kept") == 1


def test_a_prompt_that_cannot_be_answered_is_told_and_the_others_are(tiny: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"prompt": "cat " * 5000}) + "\n" + json.dumps({"prompt": "the cat"}) + "\n")
    told = answer(tiny, prompts, out)
    assert "not answered: 'cat cat" in told and "1 of 2 prompts answered" in told
    assert set(rows(out)) == {"the cat"}


@pytest.mark.parametrize("content", ['{"question": 1}\n', '{"question": 1}', "notes"])
def test_another_file_is_not_written_to(tmp_path: Path, content: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    with pytest.raises(ConfigError, match="is no file of answers"):
        open_answers(other, "some", SamplingParams())
    assert other.read_text() == content


@pytest.mark.parametrize("change", [{"model": "other"}, {"seed": 4}, {"temperature": 0.5}, {"max_tokens": 7}])
def test_answers_made_otherwise_are_not_taken_for_these(tiny: str, answers: Path, change: dict[str, Any]) -> None:
    made = {"model": tiny, "seed": 3, "temperature": 1.0, "max_tokens": 6}
    kept = {prompt: row["tokens"] for prompt, row in rows(answers).items()}
    assert open_answers(answers, made.pop("model"), SamplingParams(**made)) == kept and set(kept) == set(PROMPTS)
    changed = made | {"model": tiny} | change
    with pytest.raises(ConfigError, match=f"holds answers of model {tiny}, max_tokens 6, temperature 1 and seed 3"):
        open_answers(answers, changed.pop("model"), SamplingParams(**changed))


def older(answers: Path) -> Path:
    """The file as it was written before rows named their model and max_tokens."""
    old = [{key: row[key] for key in row if key not in ("model", "max_tokens")} for row in rows(answers).values()]
    answers.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in old))
    return answers


def test_answers_become_a_datastore_and_training_text_also_where_they_do_not_name_their_model(
    tiny: str, answers: Path, tmp_path: Path
) -> None:
    for number, made in enumerate((lambda answers: answers, older)):
        file = made(answers)
        tokens = {prompt: row["tokens"] for prompt, row in rows(file).items()}
        assert {row.prompt: row.tokens for row in read_prompts(file, "data")} == tokens
        build(load_tokenizer(tiny), [file], tmp_path / f"store-{number}")
        (text,) = Datastore(tmp_path / f"store-{number}").texts()
        assert all(str(one)[1:-1] in str(text.tolist()) for one in tokens.values())
    with pytest.raises(ConfigError, match="holds answers of model unknown, max_tokens unknown"):
        open_answers(answers, tiny, SamplingParams(temperature=1.0, seed=3, max_tokens=6))
