"""What somebody may have meant who wrote a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """The end of an error: the known name that is like this one, if any is. before: what stands before the name."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {before}{near[0]}?" if near else ""
