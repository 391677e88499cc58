"""How right an answer is: exact match and F1 over words as in SQuAD, and whether it contains an accepted answer."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, else 0."""
    return float(normalised(answer) in {normalised(reference) for reference in references})


def subspan_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer's first line contains one of the references, else 0: best-subspan exact match of *Lost in the
    Middle*, where an answer that copies the whole passage must not count.
    """
    told = normalised(answer.strip().partition("\n")[0])
    return float(any(normalised(reference) in told for reference in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall over words."""
    return max(_f1(normalised(answer).split(), normalised(reference).split()) for reference in references)


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))
