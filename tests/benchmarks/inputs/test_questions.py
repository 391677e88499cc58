"""Question files as other people write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cli.options import question_files
from benchmarks.inputs.questions import read_questions
from engine.core.errors import ConfigError, RequestError

ROW = {"question_id": 1, "category": "writing", "turns": ["Write.", "Again."]}


def test_a_question_may_hold_any_character(tmp_path: Path) -> None:
    file, prompt = tmp_path / "q.jsonl", "one\u2028two\u2029three\x85four"
    file.write_text(json.dumps(ROW | {"turns": [prompt]}, ensure_ascii=False) + "\n\n", encoding="utf8")
    assert [question.prompt for question in read_questions(file)] == [prompt]


def test_a_line_may_hold_a_prompt_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": "two", "tokens": [1]}\n')
    questions = read_questions(tmp_path / "q.jsonl")
    assert [(question.question_id, question.turns) for question in questions] == [("1", ["one"]), ("3", ["two"])]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        *((junk, "") for junk in (b"\xff\xfe\n", b"{}\n", b"[" * 100_000)),
        *(
            (json.dumps(ROW | {"turns": turns}).encode(), "is no question .*turns")
            for turns in ("Hello", [], [1], None, [["a"]], {"a": 1})
        ),
        (json.dumps(ROW | {"turns": ["Other."]}).encode(), ".*another one has the question_id '1'"),
    ],
)
def test_what_is_no_other_question_is_refused_with_its_line(tmp_path: Path, line: bytes, told: str) -> None:
    (tmp_path / "q.jsonl").write_bytes(json.dumps(ROW).encode() + b"\n" + line)
    with pytest.raises(RequestError, match=rf"q\.jsonl:2: {told}"):
        read_questions(tmp_path / "q.jsonl")
    assert len(read_questions(tmp_path / "q.jsonl", limit=1)) == 1


def test_two_files_of_one_name_are_refused() -> None:
    one, other, third = Path("gsm8k/dev.jsonl"), Path("mt/dev.jsonl"), Path("sum.jsonl")
    assert question_files([one, third]) == [one, third]
    with pytest.raises(ConfigError, match=r"--questions: gsm8k/dev\.jsonl and mt/dev\.jsonl would both be"):
        question_files([one, third, other])
    with pytest.raises(ConfigError, match=r"sum\.jsonl and sum\.jsonl would both be"):
        question_files([third, third])
