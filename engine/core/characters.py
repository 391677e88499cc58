"""Tells which strings are text: what UTF-8 can encode."""

from __future__ import annotations

HALF_A_CHARACTER = "holds half a character; decode the text it comes from as UTF-8"


def is_text(text: str) -> bool:
    """Return whether UTF-8 can encode it. Where JSON's two escapes of one character were cut, a lone
    surrogate is left.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
