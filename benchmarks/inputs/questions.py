"""Question files: JSONL in Spec-Bench's form, with `question_id`, `category` and `turns`, or with a `prompt` each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import RequestError
from engine.files.json_lines import BadLine, json_lines
from engine.frontend.prompts import check_room
from engine.text.encode import encode_text


class Question(msgspec.Struct, frozen=True):
    """A question of a file. turns: the user's messages in order, each after the answer to the one before."""

    question_id: str
    category: str
    turns: list[str]

    @property
    def prompt(self) -> str:
        """The first turn, which depends on no answer."""
        return self.turns[0]

    def encoded(self, tokenizer: Any, answers: Sequence[str]) -> list[int]:
        """Return the token ids of the conversation after these answers; for a model without a chat template, of the
        bare text.
        """
        if not answers:
            return encode_text(tokenizer, self.prompt)
        said = [*zip(self.turns, answers, strict=False)]
        last = self.turns[len(answers)]
        if not tokenizer.chat_template:
            return encode_text(tokenizer, "\n\n".join([*(text for pair in said for text in pair), last]))
        messages = [
            {"role": role, "content": text}
            for pair in said
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        return encode_text(tokenizer, [*messages, {"role": "user", "content": last}])


@dataclass(frozen=True)
class AskedQuestion:
    """A question and its prompt."""

    suite: str
    question: Question
    prompt: list[int]


@contextmanager
def naming(suite: str, question: Question, turn: int = 1) -> Iterator[None]:
    """Prefix the refusal of a prompt with its question."""
    try:
        yield
    except RequestError as error:
        later = f", turn {turn}" if turn > 1 else ""
        raise RequestError(f"question {question.question_id} of {suite}{later}: {error}") from None


def check_prompts(asked: Iterable[AskedQuestion], max_tokens: int, context: int) -> None:
    """Refuse a prompt that leaves no space for its answer now, not after hours of others."""
    for one in asked:
        with naming(one.suite, one.question):
            check_room(one.prompt, max_tokens, context)


class _Row(msgspec.Struct):
    """A row in Spec-Bench's form, or just a `prompt`."""

    question_id: str | int = ""
    category: str = ""
    turns: list[str] = []
    prompt: str = ""

    def question(self, number: int) -> Question:
        """Return the question. number: of the line."""
        turns = self.turns or [self.prompt]
        if not all(turns):
            raise BadLine(number, "has neither turns nor a prompt, or an empty one")
        return Question(str(self.question_id) or str(number), self.category, turns)


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Return the first `limit` questions of a file. Raises RequestError naming the line that is wrong."""
    questions: dict[str, Question] = {}
    try:
        with path.open("rb") as file:
            for number, row in islice(json_lines(file, _Row), limit):
                question = row.question(number)
                if question.question_id in questions:  # the id distinguishes rows of results
                    raise BadLine(number, f"another one has the question_id {question.question_id!r}")
                questions[question.question_id] = question
    except OSError as error:
        raise RequestError(f"questions={path}: cannot be read: {error.strerror}") from None
    except BadLine as error:
        raise RequestError(
            f"questions={path}:{error.number}: is no question ({error.reason}); it needs turns, a list of texts, or a "
            "prompt"
        ) from None
    if not questions:
        raise RequestError(f"questions={path}: holds no questions")
    return [*questions.values()]


def mixed_questions(files: Sequence[Path], limit: int | None = None) -> list[tuple[str, Question]]:
    """Return one question of each file with the file's name, then the next of each."""
    suites = [[(file.stem, question) for question in read_questions(file, limit)] for file in files]
    return [one for row in zip_longest(*suites) for one in row if one is not None]
