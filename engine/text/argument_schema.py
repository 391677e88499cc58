"""What a JSON schema says of a call's arguments: where its references lead, and what may be written as plain text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from engine.core.grammar import NAMED_SCHEMAS, SCHEMA_VALUES

ANYTHING: dict[str, Any] = {}  # a schema
_BESIDE = ("$defs", "definitions", "$id")  # what only references need

_KEYWORDS = frozenset((
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "items", "prefixItems", "additionalItems", "maxItems", "minItems", "uniqueItems",
    "contains", "minContains", "maxContains", "unevaluatedItems", "properties", "patternProperties",
    "additionalProperties", "required", "maxProperties", "minProperties", "propertyNames", "unevaluatedProperties",
    "dependentRequired", "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "$ref", "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Keywords that forbid values. Formats do so only of texts."""
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
"""Kinds of values, as schemas name them, and what JSON is read as."""


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
        return schema if isinstance(schema, dict) else ANYTHING

    def kinds(self, schema: Any) -> frozenset[str]:
        """Return the kinds of values that a part allows, "" among them if it does not say."""
        kinds = (one.get("type") for one in self.alternatives(schema))
        return frozenset(kind if isinstance(kind, str) else "" for kind in kinds)

    def alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """Return the schemas of which a value follows one. Each is of one kind of values, if it says of which, and
        lists values as `enum`.
        """
        found: list[dict[str, Any]] = []
        seen, waiting = set[int](), [self.resolved(schema)]
        while waiting:
            one = waiting.pop(0)
            options = one.get("anyOf", one.get("oneOf"))
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(options, list) and "type" not in one:
                waiting[:0] = map(self.resolved, options)
            else:
                found += _of_one_kind(one)
        return found

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


def keywords(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that forbid values."""
    return {key for key in schema if key in _KEYWORDS}


def is_of(value: Any, kind: str) -> bool:
    """Return whether a value is of a kind, which is a `type` of schemas."""
    if isinstance(value, float):
        return kind == "number" or (kind == "integer" and value.is_integer())
    return isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _of_one_kind(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema of several kinds of values, or of listed ones, as one schema for each kind."""
    said = schema.get("type")
    kinds = [kind for kind in said if isinstance(kind, str)] if isinstance(said, list) else [said]
    if "const" not in schema and not isinstance(schema.get("enum"), list):
        return [{**schema, "type": kind} for kind in kinds] if isinstance(said, list) else [schema]
    options = [schema["const"]] if "const" in schema else schema["enum"]
    rest = {key: value for key, value in schema.items() if key != "const"}
    kinds = kinds if isinstance(said, list | str) else [kind for kind in _TYPES if kind != "integer"]
    listed = {kind: [one for one in options if is_of(one, kind)] for kind in kinds}
    return [{**rest, "type": kind, "enum": values} for kind, values in listed.items() if values]


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
