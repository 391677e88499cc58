"""What a JSON schema says of a call's arguments: where its references lead, and what may be written as plain text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from engine.core.grammar import NAMED_SCHEMAS, SCHEMA_VALUES

_BESIDE = ("$defs", "definitions", "$id")  # what only references need


class ArgumentSchema:
    """The schema of a call's arguments. root: all of it, which the references of its parts lead into."""

    def __init__(self, root: dict[str, Any]):
        self.root = root

    def resolved(self, schema: Any) -> dict[str, Any]:
        """Return what a part refers to, or the part itself."""
        for _ in range(8):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                break
            schema = self._target(schema["$ref"])
        return schema if isinstance(schema, dict) else {}

    def is_text(self, schema: Any) -> bool:
        """Return whether a value is written as plain text in formats that have plain texts: strings, and what may be a
        string.
        """
        schema = self.resolved(schema)
        kinds = schema.get("type", ())
        if "string" in ([kinds] if isinstance(kinds, str) else kinds):
            return True
        if not kinds and (options := self.options(schema)):
            return any(isinstance(option, str) for option in options)
        return any(self.is_text(one) for key in ("anyOf", "oneOf") for one in schema.get(key, ()))

    def options(self, schema: Any) -> list[Any]:
        """Return the only values that a part allows; none if it does not list them."""
        schema = self.resolved(schema)
        return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))

    def alone(self, schema: Any) -> dict[str, Any]:
        """Return a part as a schema of its own, which holds all that it refers to."""
        references: list[str] = []

        def moved(reference: str) -> str:
            if reference not in references and self._target(reference) is not None:
                references.append(reference)
            return f"#/$defs/{references.index(reference)}" if reference in references else reference

        part: dict[str, Any] = _with_references(schema, moved) if isinstance(schema, dict) else {}
        shared = {}
        for number, reference in enumerate(references):  # which grow in the loop
            shared[str(number)] = _with_references(self._target(reference), moved)
        return part | {"$defs": shared} if shared else part

    def _target(self, reference: str) -> Any:
        """Return what a reference leads to, None if that is nothing within the root."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        found: Any = self.root
        for key in unquote(reference).split("/")[1:]:
            members = {str(number): item for number, item in enumerate(found)} if isinstance(found, list) else found
            name = key.replace("~1", "/").replace("~0", "~")
            found = members.get(name) if isinstance(members, dict) else None
        return found


def _with_references(schema: Any, moved: Callable[[str], str]) -> Any:
    """Return a schema with its references moved, and without definitions. Names and values are no references."""
    if isinstance(schema, list):
        return [_with_references(one, moved) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            kept[key] = moved(value)
        elif key in SCHEMA_VALUES:
            kept[key] = value
        elif key in NAMED_SCHEMAS and key not in _BESIDE and isinstance(value, dict):
            kept[key] = {name: _with_references(one, moved) for name, one in value.items()}
        elif key not in _BESIDE:
            kept[key] = _with_references(value, moved)
    return kept
