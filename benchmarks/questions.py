"""Question files of the Spec-Bench form: JSONL with `question_id`, `category` and `turns`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import RequestError
from engine.json_lines import BadLine, json_lines


class Question(msgspec.Struct, frozen=True):
    """The first turn of a question; follow-up turns would depend on an answer."""

    question_id: str
    category: str
    prompt: str


class _Row(msgspec.Struct):
    question_id: str | int
    category: str
    turns: Annotated[list[str], msgspec.Meta(min_length=1)]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file. Raises RequestError naming the line that is wrong."""
    questions: list[Question] = []
    try:
        with path.open("rb") as file:
            for _, row in islice(json_lines(file, _Row), limit):
                questions.append(Question(str(row.question_id), row.category, row.turns[0]))
    except OSError as error:
        raise RequestError(f"questions={path}: cannot be read: {error.strerror}") from None
    except BadLine as error:
        raise RequestError(
            f"questions={path}:{error.number}: not a Spec-Bench row ({error.reason}); it needs question_id, category "
            "and turns, a list of texts"
        ) from None
    if not questions:
        raise RequestError(f"questions={path}: holds no questions")
    return questions


def mixed_questions(files: Sequence[Path], limit: int | None = None) -> list[tuple[str, Question]]:
    """One question of each file with the file's name, then the next of each."""
    suites = [[(file.stem, question) for question in read_questions(file, limit)] for file in files]
    return [one for row in zip_longest(*suites) for one in row if one is not None]
