"""Reads the arguments of a call as they arrive, however a model writes them: JSON comes out, piece by piece.

A reader's `feed` takes text that begins where the last piece ended. It returns how many characters it has read, and the
JSON that they stand for. `done` says that the arguments are complete: what follows is not read.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Protocol

from engine.text.answer_format import ParameterMarks
from engine.text.argument_schema import is_of

GEMMA_NAME = r'[^\s:{}\[\],"<][^\n:{}\[\],"<]*'
"""Regular expression of names that Gemma's objects have without quotes; others are JSON."""
_NAME = re.compile(GEMMA_NAME)
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"[-+.0-9eE]+")
_BEGINNINGS = {
    "null": re.compile(r"n(u(ll?)?)?"),
    "boolean": re.compile(r"t(r(ue?)?)?|f(a(l(se?)?)?)?"),
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": re.compile(r"\[.*", re.DOTALL),
    "object": re.compile(r"\{.*", re.DOTALL),
}
"""What JSON of each kind may begin with."""
_PLAIN = re.compile(r"[^{}\[\],\s]+")


class ArgumentsReader(Protocol):
    """What every reader has; see the module."""

    done: bool

    def feed(self, text: str) -> tuple[int, str]:
        """Read what is certain, and return the number of characters read and their JSON."""


class JsonReader:
    """Reads a JSON value as it is: `done` when it has closed what it opened."""

    def __init__(self) -> None:
        self.done = False
        self._depth, self._within, self._escaped = 0, False, False

    def feed(self, text: str) -> tuple[int, str]:
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._within:
                self._escaped = character == "\\"
                self._within = character != '"'
            elif character == '"':
                self._within = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return at + 1, text[: at + 1]
        return len(text), text


class _StepReader(ABC):
    """Reads step by step, until a step reads nothing."""

    done = False

    def feed(self, text: str) -> tuple[int, str]:
        read, out = 0, ""
        while not self.done and read < len(text):
            count, more = self._step(text[read:])
            read, out = read + count, out + more
            if not count:
                break
        return read, out

    @abstractmethod
    def _step(self, text: str) -> tuple[int, str]:
        """Return what `feed` does of the beginning of the text; 0 if more of it has to come first."""


class ParametersReader(_StepReader):
    """Reads parameters, such as Qwen3-Coder's. marks: what they are written between; end: what follows the last one.
    texts: by the name of each parameter whose value may be a text, which is written as it is, the kinds of other values
    that it may be. Of other parameters the value is JSON.
    """

    def __init__(self, marks: ParameterMarks, end: str, texts: Mapping[str, Collection[str]]):
        self._marks, self._end, self._texts = marks, end, texts
        self._name: str | None = None
        self._is_text: bool | None = None  # whether the value is a text, None while it may be something else
        self._count = 0

    def _step(self, text: str) -> tuple[int, str]:
        if self._name is not None:
            return self._value(text, self._texts.get(self._name, ()))
        if text.startswith(self._end):
            self.done = True
            return 0, "}" if self._count else "{}"
        opens, middle = self._marks.opens, self._marks.middle
        name, found, _ = text.removeprefix(opens).partition(middle)
        if not (text.startswith(opens) and found):
            return 0, ""
        self._name, self._count = name, self._count + 1
        self._is_text = None if self._texts.get(name) else name in self._texts
        key = f"{', ' if self._count > 1 else '{'}{json.dumps(name)}: " + '"' * bool(self._is_text)
        return len(opens + name + middle), key

    def _value(self, text: str, others: Collection[str]) -> tuple[int, str]:
        end = text.find(self._marks.closes)
        value = text[: len(text) - begun(text, self._marks.closes)] if end < 0 else text[:end]
        opens = ""
        if self._is_text is None:
            if end < 0 and _may_become(value, others):
                return 0, ""
            self._is_text = end < 0 or not _is_json(value, others)
            opens = '"' * self._is_text
        out = opens + (json.dumps(value, ensure_ascii=False)[1:-1] if self._is_text else value)
        if end < 0:
            return len(value), out
        self._name = None
        return end + len(self._marks.closes), out + '"' * self._is_text


class GemmaReader(_StepReader):
    """Reads Gemma's object: names without quotes, and texts between two `quote`. Names and texts may be JSON too."""

    def __init__(self, quote: str):
        self._quote = quote
        self._open: list[str] = []
        self._within, self._names = False, False

    def _step(self, text: str) -> tuple[int, str]:
        if self._within:
            end = text.find(self._quote)
            value = text[: len(text) - begun(text, self._quote)] if end < 0 else text[:end]
            self._within = end < 0
            out = json.dumps(value, ensure_ascii=False)[1:-1]
            return (len(value), out) if end < 0 else (end + len(self._quote), out + '"')
        if text.startswith(self._quote):
            self._within = True
            return len(self._quote), '"'
        if begun(text, self._quote) == len(text):
            return 0, ""
        if text[0].isspace():
            return 1, ""
        if text[0] == '"' or (self._names and _NAME.match(text)):
            return self._name(text) if self._names else self._json_text(text)
        return self._other(text)

    def _name(self, text: str) -> tuple[int, str]:
        found = (_JSON_TEXT if text[0] == '"' else _NAME).match(text)
        if found is None or found.end() == len(text):
            return 0, ""
        self._names = False
        return found.end() + 1, f"{found[0]}: " if found.re is _JSON_TEXT else f"{json.dumps(found[0])}: "

    def _json_text(self, text: str) -> tuple[int, str]:
        found = _JSON_TEXT.match(text)
        return (0, "") if found is None else (found.end(), found[0])

    def _other(self, text: str) -> tuple[int, str]:
        """Read a mark, or a value that is no text."""
        character = text[0]
        if character in "{[":
            self._open.append(character)
        elif character in "}]":
            self._open.pop()
            self.done = not self._open
        elif character != "," and (plain := _PLAIN.match(text)):
            return plain.end(), plain[0]
        self._names = character in "{," and bool(self._open) and self._open[-1] == "{" and not self.done
        return 1, ", " if character == "," else character


class PythonReader(_StepReader):
    """Reads NAME=VALUE, separated by commas, up to the `)` that closes them. Values are JSON, or as Python writes
    them.
    """

    def __init__(self) -> None:
        self._count, self._end = 0, _ValueEnd()

    def _step(self, text: str) -> tuple[int, str]:
        if text[0] == ")":
            self.done = True
            return 0, "}" if self._count else "{}"
        name, found, rest = text.lstrip(", ").partition("=")
        if not found or (length := self._end.find(rest)) is None:
            return 0, ""
        self._count, self._end = self._count + 1, _ValueEnd()
        read = len(text) - len(rest) + length
        return read, f"{', ' if self._count > 1 else '{'}{json.dumps(name)}: {_json_of(rest[:length])}"


class _ValueEnd:
    """Finds the comma or parenthesis, outside of quotes and brackets, at which a value ends."""

    def __init__(self) -> None:
        self._looked_at, self._depth, self._quote, self._escaped = 0, 0, "", False

    def find(self, text: str) -> int | None:
        """Return where the value ends, None if that is not there yet. text: what was looked at before, and more."""
        for at in range(self._looked_at, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            elif character in "[{(":
                self._depth += 1
            elif not self._depth and character in ",)":
                return at
            elif character in "]})":
                self._depth -= 1
        self._looked_at = len(text)
        return None


def _json_of(value: str) -> str:
    """Return a value in JSON; what neither JSON nor Python reads is a text."""
    try:
        json.loads(value)
        return value
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(value, ensure_ascii=False)


def gemma_name(name: str) -> str:
    """Return a name as Gemma's objects have it."""
    return name if _NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _may_become(text: str, kinds: Collection[str]) -> bool:
    """Return whether JSON of one of the kinds may begin with a text."""
    return not text.strip() or any(kind in kinds and form.fullmatch(text.strip()) for kind, form in _BEGINNINGS.items())


def _is_json(text: str, kinds: Collection[str]) -> bool:
    """Return whether a text is JSON of one of the kinds."""
    try:
        value = json.loads(text, parse_constant=int)  # which refuses NaN and Infinity
    except (ValueError, RecursionError):
        return False
    return any(is_of(value, kind) for kind in kinds)


def begun(text: str, mark: str) -> int:
    """Return with how many characters of the beginning of `mark` the text ends; never all of them."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
