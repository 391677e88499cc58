from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants import Run
from benchmarks.knowledge import Item, prompt_of, read_items
from benchmarks.qa import line_of, table_of
from engine.errors import RequestError
from tests.benchmarks.test_commands import talon
from tests.conftest import tiny_tokenizer

NQ = "Answer the question using the passage.\n\nPassage: Cats. Cats purr.\n\nQuestion: what purrs"
RAG = "Dogs bark.\nOwls hoot.\n\nWhat hoots?"
ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "nq", "turns": [NQ], "reference": ["Cats", "cats"]},
    {"question_id": 2, "category": "rag", "turns": [RAG], "reference": [["Owls"]]},
    {"question_id": 3, "category": "qa", "turns": ["Who sings?"]},
    {"question_id": 4, "category": "writing", "turns": ["Write."]},
    {"question_id": 5, "category": "nq", "turns": [NQ.replace("purr", "nap")], "reference": ["Cats"]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "knowledge.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run_of(tokens: list[int], rounds: int = 2) -> Run:
    return Run(tokens, 0.5, rounds, None, None, None, None, [])


def test_questions_are_taken_out_of_prompts_with_passages(questions: Path) -> None:
    items, passages = read_items(questions, limit=1)
    assert [(item.kind, item.question) for item in items] == [
        ("nq", "what purrs"), ("rag", "What hoots?"), ("qa", "Who sings?"),
    ]  # fmt: skip
    assert [item.references for item in items] == [["Cats", "cats"], ["Owls"], []]
    assert passages == ["Cats. Cats purr.", "Dogs bark.", "Owls hoot.", "Cats. Cats nap."], "beyond the limit too"


def test_a_prompt_with_its_own_passage_is_the_files_prompt(questions: Path) -> None:
    item = read_items(questions)[0][0]
    assert prompt_of(item.question, item.passages) == NQ
    assert prompt_of(item.question, []) == "what purrs"


@pytest.mark.parametrize("line", ["{}", "[1]", "x", '{"question_id": 1, "category": "nq", "turns": ["no passage"]}'])
def test_a_row_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "q.jsonl").write_text(line + "\n")
    with pytest.raises(RequestError, match=r"q\.jsonl:1"):
        read_items(tmp_path / "q.jsonl")


def test_only_answers_with_references_are_scored() -> None:
    items = [Item("1", "nq", "q", [], ["cat"]), Item("2", "qa", "q", [], [])]
    runs = [run_of(tiny_tokenizer().encode(text)) for text in ("The cat.", "dog")]
    line = line_of("closed-book", "none", items, runs, tiny_tokenizer())
    assert (line.exact_match, line.f1) == (1, 1)
    assert line.mean_accepted_tokens == pytest.approx((8 - 1 + 3 - 1) / 4)
    assert line.tokens_per_second == 11
    line.ties, line.different = 0, ["qa 2"]
    assert [list(column.cells) for column in table_of([line]).columns[-2:]] == [["1/2"], ["0"]]


def test_the_command_answers_in_both_settings(tiny: str, questions: Path) -> None:
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--max-tokens", "8", "--passages", "2"]
    done = talon("qa", "--questions", str(questions), "--methods", "suffix,suffix+dense", "--json", *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(line["setting"], line["method"]) for line in told["lines"]] == [
        (setting, method)
        for setting in ("closed-book", "with passages")
        for method in ("none", "suffix", "suffix+dense")
    ]
    for line in told["lines"]:
        assert line["different"] == [] and line["ties"] == 0 and line["answers"] == 4 and line["tokens_per_second"] > 0
        assert line["exact_match"] == told["lines"][0 if line["setting"] == "closed-book" else 3]["exact_match"]
    assert told["retrieval"]["passages"] == 4 and told["retrieval"]["questions"] == 3
    assert told["retrieval"]["recall_at_count"] >= told["retrieval"]["recall_at_1"]


def test_files_without_passages_are_asked_closed_book_only(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--max-tokens", "8"]
    done = talon("qa", "--questions", str(tmp_path / "qa.jsonl"), "--methods", "pld", *options)
    assert done.returncode == 0, done.stderr
    assert "closed-book" in done.stdout and "with passages" not in done.stdout
    done = talon("qa", "--questions", str(tmp_path / "qa.jsonl"), "--methods", "suffix+dense", *options)
    assert done.returncode == 2 and "needs passages" in done.stderr
    assert talon("qa").returncode == 2
