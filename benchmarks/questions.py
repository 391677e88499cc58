"""Question files of the Spec-Bench form: JSONL with `question_id`, `category` and `turns`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from engine.errors import RequestError


class Question(msgspec.Struct, frozen=True):
    """The first turn of a question; follow-up turns would depend on an answer."""

    question_id: str
    category: str
    prompt: str


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file. Raises RequestError naming the line that is wrong."""
    questions: list[Question] = []
    try:
        with path.open(encoding="utf8") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(questions) >= limit:
                    break
                try:
                    row = json.loads(line)
                    questions.append(Question(str(row["question_id"]), str(row["category"]), str(row["turns"][0])))
                except (ValueError, KeyError, IndexError, TypeError):
                    raise RequestError(
                        f"questions={path}:{number}: not a Spec-Bench row; it needs question_id, category and turns"
                    ) from None
    except OSError as error:
        raise RequestError(f"questions={path}: cannot be read: {error.strerror}") from None
    if not questions:
        raise RequestError(f"questions={path}: holds no questions")
    return questions
