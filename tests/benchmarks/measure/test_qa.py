from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks.inputs.knowledge import Item, prompt_of, quoted, read_items
from benchmarks.measure.qa import row_of
from benchmarks.measure.timed_answer import TimedAnswer
from benchmarks.report.qa_figures import Scores, score_table, speed_table
from engine.core.errors import RequestError
from tests.command import talon
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


def run_of(tokens: list[int], rounds: int = 2) -> TimedAnswer:
    return TimedAnswer(tokens, 0.5, rounds, None, None, None, None, [])


def test_questions_are_taken_out_of_prompts_with_passages(questions: Path) -> None:
    items, passages = read_items(questions, limit=1)
    assert [(item.kind, item.question) for item in items] == [
        ("nq", "what purrs"), ("rag", "What hoots?"), ("qa", "Who sings?"),
    ]  # fmt: skip
    assert [item.references for item in items] == [("Cats", "cats"), ("Owls",), ()]
    assert passages == ["Cats. Cats purr.", "Dogs bark.", "Owls hoot.", "Cats. Cats nap."], "beyond the limit too"


def test_a_prompt_with_its_own_passage_is_the_files_prompt(questions: Path) -> None:
    item = read_items(questions)[0][0]
    assert prompt_of(item.question, [*item.passages]) == NQ
    assert prompt_of(item.question, []) == "what purrs"


@pytest.mark.parametrize("line", ["{}", "[1]", "x", '{"question_id": 1, "category": "nq", "turns": ["no passage"]}'])
def test_a_row_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "q.jsonl").write_text(line + "\n")
    with pytest.raises(RequestError, match=r"q\.jsonl:1"):
        read_items(tmp_path / "q.jsonl")


def test_only_answers_with_references_are_scored_and_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    items = [Item("1", "nq", "q", (), ("cat",)), Item("2", "nq", "q", (), ())]
    rows = [
        msgspec.structs.replace(
            row_of("retrieved", item, name, run_of(tiny_tokenizer().encode(text)), tiny_tokenizer(), []),
            seconds=seconds,
        )
        for item, text in zip(items, ("The cat.", "dog"), strict=True)
        for name, seconds in (("none", 1.0), ("hybrid", 0.5))
    ]
    assert [row.scores for row in rows] == [Scores(1, 1, 1)] * 2 + [None] * 2
    speed, scores = speed_table(rows), score_table(rows)
    assert speed.rows[1][4:] == ["2.00x", "2.00-2.00", f"{(8 - 1 + 3 - 1) / 4:.2f}", "2/2"]
    assert scores.rows[0][2:5] == ["2", "1.00 (1.00-1.00)", "1.00 (1.00-1.00)"] and scores.rows[0][-1] == "1 of 1"
    Console(width=80).print(speed.rich(), scores.rich())
    assert "…" not in capsys.readouterr().out


def test_an_answer_quotes_the_passages_that_hold_its_runs_of_four_words() -> None:
    assert quoted("The cat sat on a mat today.", ["a cat sat on the mat"]) == pytest.approx(1 / 2)
    assert quoted("Too short", ["Too short"]) is None


def test_the_command_answers_in_every_setting(tiny: str, questions: Path, tmp_path: Path) -> None:
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--max-tokens", "8", "--passages", "2"]
    methods = ["suffix", "datastore"]
    done = talon(
        "qa", "--questions", str(questions), "--methods", ",".join(methods), "--json", "--out", str(tmp_path), *options
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert Counter((row["setting"], row["method"]) for row in told["rows"]) == {
        (setting, method): count
        for setting, count in (("closed book", 4), ("own passage", 3), ("retrieved", 4))
        for method in ("none", *methods)
    }
    assert (tmp_path / "qa.jsonl").read_text().count("\n") == len(told["rows"])
    plain = {(r["setting"], r["question_id"]): r["scores"] for r in told["rows"] if r["method"] == "none"}
    for row in told["rows"]:
        assert row["output_equal"] and row["scores"] == plain[row["setting"], row["question_id"]]
    assert told["retrieval"]["passages"] == 4 and told["retrieval"]["questions"] == 3
    assert told["retrieval"]["recall_at_count"] >= told["retrieval"]["recall_at_1"]


def test_files_without_passages_are_asked_closed_book_only(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    options = ["--set", f"model={tiny}", "--set", "transport=inproc", "--max-tokens", "8"]
    done = talon(
        "qa", "--questions", str(tmp_path / "qa.jsonl"), "--out", str(tmp_path / "out"), "--methods", "pld", *options
    )
    assert done.exit_code == 0, done.stderr
    assert "closed book" in done.stdout and "retrieved" not in done.stdout
    assert talon("qa").exit_code == 2


def test_two_questions_of_one_kind_and_id_are_refused(questions: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(ROWS[1]) + "\n")
    done = talon("qa", "--questions", str(questions), "--questions", str(other), "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert (
        done.stderr.splitlines()[-1] == "talon: --questions: 2 questions of rag have the question_id '2'; rename them"
    )


def test_a_prompt_that_a_later_setting_makes_too_long_is_refused_before_any_is_asked(tiny: str, tmp_path: Path) -> None:
    long = NQ.replace("Cats purr.", "Cats purr. " * 60)
    (tmp_path / "q.jsonl").write_text(json.dumps(ROWS[0] | {"turns": [long]}) + "\n")
    options = ["--questions", str(tmp_path / "q.jsonl"), "--methods", "none", "--out", str(tmp_path)]
    done = talon("qa", *options, "--set", f"model={tiny}", "--set", "transport=inproc")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("talon: question 1 of nq, own passage: ")
    assert not (tmp_path / "qa.jsonl").exists()


def test_a_run_that_was_stopped_goes_on_where_it_stopped(tiny: str, questions: Path, tmp_path: Path) -> None:
    options = ["--questions", str(questions), "--methods", "talon-pld", "--max-tokens", "4", "--out", str(tmp_path)]
    options += ["--set", f"model={tiny}", "--set", "transport=inproc"]
    assert talon("qa", *options).exit_code == 0
    whole = (tmp_path / "qa.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "qa.jsonl").write_text("".join(lines[:9]) + lines[9][:30])  # the fifth question has one of two rows
    done = talon("qa", *options, "--resume")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "qa.jsonl").read_text().startswith("".join(lines[:8]))

    def asked(text: str) -> Counter[tuple[str, ...]]:
        rows = [json.loads(line) for line in text.splitlines()]
        return Counter((row["setting"], row["kind"], row["question_id"], row["method"]) for row in rows)

    assert asked((tmp_path / "qa.jsonl").read_text()) == asked(whole)
    done = talon("qa", *options[:2], "--methods", "none", *options[4:], "--resume")
    assert done.exit_code == 2 and "has rows of talon-pld: give the same --methods" in done.stderr
