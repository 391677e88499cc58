"""Reads the JSON that a model wrote. It may be cut off within it, nest without end, or write numbers that nobody can
send on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_DEEPEST = 200  # levels within each other: templates and encoders recurse into a value


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, None if the text is no object that can be read. An empty text is no arguments."""
    try:
        arguments = read_json(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for a text that is none, and for a value that could not be
    sent on as JSON.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nests too deep") from None
    if _nests_too_deep(value):
        raise ValueError("nests too deep")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _nests_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    """Return the values within an object or a list."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
