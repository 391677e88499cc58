"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """Return the end of an error: the most similar known name, if there is one. before: what precedes the name."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {before}{near[0]}?" if near else ""
