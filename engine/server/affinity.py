"""Tells which replica a request belongs to: the one that holds its session's suffix cache and its prompt's blocks."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

SESSION_HEADER = "x-session-id"
_BEGINNING = 1024
"""Leading characters of a prompt that decide. Turns of one conversation begin alike, other questions seldom do."""


def session_of(header: str | None, body: bytes) -> str:
    """Return the session that a request names, or a name for all requests whose prompts begin like its own."""
    if header:
        return header
    return hashlib.sha256(_beginning(body).encode("utf8", "surrogatepass")).hexdigest()


def _beginning(body: bytes) -> str:
    """Return the beginning of the first prompt, or of the messages joined; of anything else, of its own text."""
    try:
        asked: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    prompt = asked.get("messages") or asked.get("prompt") or ""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        prompt = "\n".join(_words(one) for one in prompt[:_BEGINNING])
    return str(prompt)[:_BEGINNING]


def _words(part: Any) -> str:
    return f"{part.get('role')}: {part.get('content')}" if isinstance(part, dict) else str(part)
