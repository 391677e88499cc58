"""Writes what a JSON schema says of a text as regular expressions of a grammar, for texts that are not JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANY = r"(.|\n)*"
_SPELLED = {"/": r"\/", "\n": r"\n", r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
"""Parts of a schema's pattern, and what they are in a grammar's expression."""
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": r"[0-9A-Za-z_+-]+(\.[0-9A-Za-z_+-]+)*@[0-9A-Za-z]+([.-][0-9A-Za-z]+)*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Formats of a schema's texts that a grammar follows where texts are no JSON."""


def text_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return expressions that a text must match as a whole, each of them: for its lengths, pattern and format."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    every = [rf"(.|\n){{{least},{most}}}" if least or most != "" else _ANY]
    if isinstance(pattern := schema.get("pattern"), str):
        every.append(_searched(pattern))
    if (of_format := _FORMATS.get(str(schema.get("format")))) is not None:
        every.append(of_format)
    return every


def _searched(pattern: str) -> str:
    """Return an expression for texts that hold what a schema's pattern describes, as the library takes it in JSON: its
    classes are those of ASCII.
    """
    parts = re.fullmatch(r"(\^?)((?:\\.|[^\\])*?)(\$?)", pattern, re.DOTALL)
    begins, inner, ends = parts.groups() if parts else ("", pattern, "")
    inner = re.sub(r"\\.|[/\n]", lambda found: _SPELLED.get(found[0], found[0]), inner, flags=re.DOTALL)
    return f"{'' if begins else _ANY}({inner}){'' if ends else _ANY}"
