"""Questions that need knowledge, extracted from prompts that carry their passages, and how right an answer is."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import RequestError
from engine.files.json_lines import BadLine, json_lines

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
KINDS = ("nq", "rag", "qa")


class Item(msgspec.Struct, frozen=True):
    """A question that needs knowledge. passages: those in its prompt (none: `qa`). references: accepted answers; empty:
    none are known.
    """

    question_id: str
    kind: str
    question: str
    passages: tuple[str, ...]
    references: tuple[str, ...]


class _Row(msgspec.Struct):
    question_id: str | int
    category: str
    turns: list[str]
    reference: Any = None


def read_items(path: Path, limit: int | None = None) -> tuple[list[Item], list[str]]:
    """Return the first `limit` items of each kind, and every passage of the file. Rows of other categories are left
    out.
    """
    items: list[Item] = []
    passages: dict[str, None] = {}
    seen: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            for number, row in json_lines(file, _Row):
                if row.category not in KINDS:
                    continue
                try:
                    item = _item(row)
                except (ValueError, IndexError, TypeError):
                    raise BadLine(number, "its prompt is of another form") from None
                passages |= dict.fromkeys(item.passages)
                seen[item.kind] += 1
                if limit is None or seen[item.kind] <= limit:
                    items.append(item)
    except OSError as error:
        raise RequestError(f"questions={path}: cannot be read: {error.strerror}") from None
    except BadLine as error:
        raise RequestError(
            f"questions={path}:{error.number}: not a row of {', '.join(KINDS)} ({error.reason}): it needs question_id, "
            "category, turns and, for nq, a passage"
        ) from None
    if not items:
        raise RequestError(f"questions={path}: holds no question of the categories {', '.join(KINDS)}")
    return items, list(passages)


def prompt_of(question: str, passages: list[str]) -> str:
    """Return the question alone, or after passages, in the wording of nq_open's prompts."""
    if not passages:
        return question
    shown = "".join(f"Passage: {passage}\n\n" for passage in passages)
    return f"Answer the question using the passage.\n\n{shown}Question: {question}"


def _item(row: _Row) -> Item:
    kind, prompt = row.category, row.turns[0].strip()
    passages: list[str] = []
    if kind == "nq":
        before, prompt = prompt.rsplit("\n\nQuestion: ", 1)
        passages = [before.split("Passage: ", 1)[1]]
    elif kind == "rag":
        *passages, prompt = filter(None, (line.strip() for line in prompt.split("\n")))
    return Item(str(row.question_id), kind, prompt, tuple(passages), tuple(_flat(row.reference or [])))


def quoted(answer: str, passages: Sequence[str], words: int = 4) -> float | None:
    """Return the share of the answer's runs of `words` words that occur in the passages; None if it is shorter."""
    runs = _runs(answer, words)
    known = set().union(*(_runs(passage, words) for passage in passages))
    return sum(run in known for run in runs) / len(runs) if runs else None


def _runs(text: str, words: int) -> list[tuple[str, ...]]:
    split = normalised(text).split()
    return [tuple(split[at : at + words]) for at in range(len(split) - words + 1)]


def _flat(references: Any) -> list[str]:
    """Return accepted answers: some files hold lists of lists."""
    if isinstance(references, str):
        return [references]
    return [text for reference in references for text in _flat(reference)]


def normalised(text: str) -> str:
    """Return the text in lower case, with no punctuation, no articles, and single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer is one of the references, else 0."""
    return float(normalised(answer) in {normalised(reference) for reference in references})


def subspan_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer's first line contains one of the references, else 0: best-subspan exact match of *Lost in
    the Middle*, where an answer that copies the whole passage must not count.
    """
    first_line = normalised(answer.strip().partition("\n")[0])
    return float(any(normalised(reference) in first_line for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words."""
    return max(_f1(normalised(answer).split(), normalised(reference).split()) for reference in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
