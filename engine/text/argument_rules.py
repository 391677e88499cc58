"""Writes the rules of a call's arguments where texts are no JSON: parameters, Python's arguments, Gemma's objects."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.core.grammar import ONE_STYLE
from engine.text.answer_format import ParameterMarks
from engine.text.argument_schema import ANYTHING, ArgumentSchema, keywords, named, of_one_kind
from engine.text.call_arguments import GEMMA_NAME, gemma_name
from engine.text.text_patterns import text_patterns

_ANY_TEXT = r"/(.|\n)*/"
_MOST_RULES = 2000  # of one tool: the library's stack does not hold a chain of 3000
_SINGLE_QUOTED = r"/'([^'\\\n]|\\['\x22\\nrt])*'/"
_PYTHON_WORDS = {"boolean": (True, False), "null": (None,)}
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_OF_ARRAYS = {"type", "items", "minItems", "maxItems"}


class ArgumentRules:
    """Writes the rules for one tool. rules: those of the grammar, to which they are added. literal: spells a text as
    the model's tokens do. schema: of the arguments.
    """

    def __init__(self, rules: list[str], literal: Callable[[str], str], schema: dict[str, Any]):
        self.rules, self.literal, self.schema = rules, literal, ArgumentSchema(schema)

    def text(self, texts: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], name: str) -> str:
        """Return a terminal for a text of one of the schemas, or a null. Other values are any text, as they are read
        from one.
        """
        if any(one.get("type") != "null" for one in others):
            return _ANY_TEXT
        ways = [choice(one["enum"]) if "enum" in one else _pattern(one) for one in texts]
        if (text := " | ".join([*ways, *['"null"'] * bool(others)])) == _ANY_TEXT:
            return text
        self.rules.append(f"{name.upper()}_TEXT: {text}")
        return f"{name.upper()}_TEXT"

    def json(self, schema: Any) -> str:
        """Return an expression for JSON of the schema."""
        return f"%json {json.dumps(self.schema.alone(schema) | ONE_STYLE)}"

    def _listed(self, parts: Sequence[tuple[str, bool]], other: str, name: str, comma: str = ",") -> str:
        """Return an expression for members of an object in their order, with commas between those that are there: a
        rule for each place, for where something came before, and for where nothing did. other: a rule for members that
        may come last, "" for none.
        """
        for number in range(len(parts), -1, -1):
            for before in (True, False):
                if number == len(parts):
                    text = f'("," {other})*' if before else f'({other} ("," {other})*)?'
                    text = text if other else '""'
                else:
                    rule, needed = parts[number]
                    text = f"{json.dumps(comma)} " * before + f"{rule} {name}_then_{number + 1}_1"
                    text += "" if needed else f" | {name}_then_{number + 1}_{int(before)}"
                self.rules.append(f"{name}_then_{number}_{int(before)}: {text}")
        return f"{name}_then_0_0"


class _NamedRules(ArgumentRules):
    """Writes arguments one after the other, each with its name."""

    def arguments(self, name: str) -> str:
        """Return an expression for all arguments. name: with which the names of its rules begin."""
        ways = [one for one in self.schema.alternatives(self.schema.root) if one.get("type") == "object"]
        written = [self._members(one, f"{name}_{number}") or '""' for number, one in enumerate(ways)]
        return f"({' | '.join(written)})"

    @abstractmethod
    def _members(self, schema: dict[str, Any], name: str) -> str:
        """Return an expression for the arguments that an object's schema names."""


class PythonRules(_NamedRules):
    """Writes NAME=VALUE, separated by commas."""

    def _members(self, schema: dict[str, Any], name: str) -> str:
        properties, needed = named(schema)
        parts = []
        for number, (key, value) in enumerate(properties.items()):
            self.rules.append(f"{name}_{number}: {json.dumps(key + '=')} ({' | '.join(self._ways(value))})")
            parts.append((f"{name}_{number}", key in needed))
        return self._listed(parts, "", name, ", ")

    def _ways(self, schema: Any) -> Iterator[str]:
        """Yield how JSON writes a value, and how Python does where that is another way."""
        yield self.json(schema)
        for one in self.schema.alternatives(schema):
            words = one.get("enum", _PYTHON_WORDS.get(str(one.get("type"))))
            if isinstance(words, Sequence):
                yield from (json.dumps(repr(word)) for word in words if word is None or isinstance(word, bool | str))
            elif one.get("type") == "string" and _pattern(one) == _ANY_TEXT:
                yield _SINGLE_QUOTED


class ParameterRules(_NamedRules):
    """Writes parameters, such as Qwen3-Coder's. marks: what they are written between; is_token: whether what closes one
    is a token.
    """

    def __init__(
        self,
        rules: list[str],
        literal: Callable[[str], str],
        schema: dict[str, Any],
        marks: ParameterMarks,
        is_token: bool,
    ):
        super().__init__(rules, literal, schema)
        self._marks, self._is_token = marks, is_token

    def _members(self, schema: dict[str, Any], name: str) -> str:
        return " ".join(self._parameters(schema, name))

    def _parameters(self, schema: dict[str, Any], name: str) -> Iterator[str]:
        properties, needed = named(schema)
        for number, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{number}"
            opens = self.literal(self._marks.opens + key + self._marks.middle)
            self.rules.append(f"{rule}: {opens} {self._value(value, rule)}")
            yield rule if key in needed else f"{rule}?"

    def _value(self, schema: Any, name: str) -> str:
        end, ways = self._marks.closes, self.schema.alternatives(schema)
        texts = [one for one in ways if one.get("type") == "string"]
        others = [one for one in ways if one.get("type") != "string"]
        if not texts:
            return f"{self.json(schema)} {self.literal(end)}"
        if all("enum" in one for one in texts):
            options = " | ".join(choice(one["enum"]) for one in texts)
            others_too = f" | {self.json({'anyOf': others})}" if others else ""
            return f"({options}{others_too}) {self.literal(end)}"
        if self._is_token:
            return f"{self.text(texts, others, name)} {self.literal(end)}"
        self.rules.append(f"{name}_text[lazy]: {self.text(texts, others, name)} {json.dumps(end)}")
        return f"{name}_text"


class GemmaRules(ArgumentRules):
    """Writes Gemma's objects: names without quotes, and texts between two `quote`. What a schema says beyond the kinds,
    names and numbers of values is followed by JSON.

    is_token: whether `quote` is one token.
    """

    def __init__(
        self, rules: list[str], literal: Callable[[str], str], schema: dict[str, Any], quote: str, is_token: bool
    ):
        super().__init__(rules, literal, schema)
        self._quote, self._is_token = quote, is_token
        self._named: dict[int, str] = {}  # rules by the identities of schemas, which live as long as the root
        self._waiting: list[tuple[dict[str, Any], str]] = []  # schemas whose rules are to be written, with their names

    def arguments(self, name: str) -> str:
        """Return an expression for all arguments, which are JSON if they take too many rules. name: with which the
        names of the rules begin.
        """
        self._name, before = name, len(self.rules)
        first = self._value(self.schema.root)
        while self._waiting:
            schema, rule = self._waiting.pop()
            if (options := self.schema.options(schema)) is not None:
                ways = [self._value(option) for option in options]
            else:
                ways = [self._way(one, f"{rule}_{number}") for number, one in enumerate(of_one_kind(schema))]
            self.rules.append(f"{rule}: {' | '.join(ways) or self.json(schema)}")
            if len(self.rules) - before > _MOST_RULES:
                del self.rules[before:]
                return self.json(self.schema.root)
        return first

    def _value(self, schema: Any) -> str:
        """Return a rule for a value, the same one wherever the schema is referred to."""
        schema = self.schema.resolved(schema)
        if id(schema) not in self._named:
            self._named[id(schema)] = f"{self._name}_{len(self._named)}"
            self._waiting.append((schema, self._named[id(schema)]))
        return self._named[id(schema)]

    def _way(self, schema: dict[str, Any], name: str) -> str:
        """Return an expression for a value of one kind."""
        kind, said = schema.get("type"), keywords(schema)
        if kind == "string":
            return self._between_quotes(schema, name)
        if kind == "object" and said <= _OF_OBJECTS and isinstance(schema.get("properties", {}), dict):
            return self._object(schema, name)
        if kind == "array" and said <= _OF_ARRAYS and isinstance(schema.get("items", True), dict | bool):
            return self._array(schema, name)
        return self.json(schema)

    def _between_quotes(self, schema: dict[str, Any], name: str) -> str:
        mark = self.literal(self._quote)
        if "enum" in schema:
            return f"{mark} ({choice(schema['enum'])}) {mark}"
        text = self.text([schema], (), name)
        if self._is_token:
            return f"{mark} {text} {mark}"
        self.rules.append(f"{name}_text[lazy]: {text} {json.dumps(self._quote)}")
        return f"{mark} {name}_text"

    def _object(self, schema: dict[str, Any], name: str) -> str:
        """Return an expression for an object. One that names properties has others only if it says so."""
        properties, needed = named(schema)
        parts = []
        for number, (key, value) in enumerate(properties.items()):
            rule = f"{name}_{number}"
            self.rules.append(f"{rule}: {json.dumps(gemma_name(key) + ':')} {self._value(value)}")
            parts.append((rule, key in needed))
        others = schema.get("additionalProperties", "properties" not in schema)
        other = "" if others is False else self._other(others, properties, name)
        return f'"{{" {self._listed(parts, other, name)} "}}"'

    def _other(self, schema: Any, properties: Collection[str], name: str) -> str:
        """Return a rule for a member that is none of the properties. Beside any, its name is not written as JSON."""
        if properties:
            self.rules.append(f"{name.upper()}_NAME: /{GEMMA_NAME}/ & ~({choice(properties)})")
            written = f"{name.upper()}_NAME"
        else:
            written = f"(/{GEMMA_NAME}/ | {self.json({'type': 'string'})})"
        self.rules.append(f'{name}_other: {written} ":" {self._value(schema)}')
        return f"{name}_other"

    def _array(self, schema: dict[str, Any], name: str) -> str:
        items = schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0 or items is False:
            return '"[" "]"'
        if not isinstance(least, int) or not isinstance(most, int | None):
            return self.json(schema)
        item = self._value(items if isinstance(items, dict) else ANYTHING)
        more = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {more} "]"' if least else f'"[" ({more})? "]"'


def choice(texts: Iterable[str]) -> str:
    """Return an expression for one of the texts."""
    return " | ".join(map(json.dumps, texts))


def _pattern(schema: Mapping[str, Any]) -> str:
    """Return an expression for a text of the schema."""
    return " & ".join(f"/{pattern}/" for pattern in text_patterns(schema))
