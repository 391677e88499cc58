"""What a JSON schema says of a call's arguments: where its references lead, and what kinds of values it allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.grammar import NAMED_SCHEMAS, SCHEMA_VALUES
from engine.core.grammar_depth import target_of

ANYTHING: dict[str, Any] = {}  # a schema
_MOST_REFERENCES = 8  # one after another
_BESIDE = ("$defs", "definitions", "$id")  # what only references need
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "array": (
        "items", "prefixItems", "additionalItems", "maxItems", "minItems", "uniqueItems", "contains", "minContains",
        "maxContains", "unevaluatedItems",
    ),
    "object": (
        "properties", "patternProperties", "additionalProperties", "required", "maxProperties", "minProperties",
        "propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
    "": (
        "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
        "$recursiveRef",
    ),
}  # fmt: skip
"""Keywords that forbid values of each kind, and of any. Formats do so only of texts."""
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
        self._numbers: dict[str, int] = {}  # names of definitions, by the references that lead to them
        self._definitions: dict[str, tuple[Any, list[str]]] = {}  # definitions as `_moved` returns them
        # by the identity of a part: the part, which so stays alive, and what its `allOf` comes to, or its options
        self._joined: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._chosen: dict[int, tuple[dict[str, Any], Sequence[dict[str, Any]] | None]] = {}

    @property
    def texts(self) -> dict[str, frozenset[str]]:
        """The kinds of other values that an argument may be, by the name of each argument that may be a text."""
        kinds: dict[str, frozenset[str]] = {}
        for one in self.alternatives(self.root):
            for name, value in named(one)[0].items():
                ways = {str(way.get("type")) for way in self.alternatives(value)}
                kinds[name] = kinds.get(name, frozenset()) | ways
        return {name: kinds[name] - {"string"} for name in kinds if "string" in kinds[name]}

    def resolved(self, schema: Any) -> dict[str, Any]:
        """Return what a part refers to, or the part itself; the schemas of an `allOf` as one, if that can be."""
        for _ in range(_MOST_REFERENCES):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                break
            if (target := target_of(self.root, schema["$ref"])) is None:
                break
            schema = target
        if not isinstance(schema, dict):
            return ANYTHING
        return self._of_all(schema) if isinstance(schema.get("allOf"), list) else schema

    def alternatives(self, schema: Any) -> list[dict[str, Any]]:
        """Return the schemas of which a value follows one. Each is of one kind of values, if that can be told, and
        lists values as `enum`.
        """
        found: list[dict[str, Any]] = []
        seen, waiting = set[int](), [self.resolved(schema)]
        while waiting:
            one = waiting.pop(0)
            if id(one) in seen:
                continue
            seen.add(id(one))
            if (options := self.options(one)) is None:
                found += of_one_kind(one)
            else:
                waiting[:0] = options
        return found

    def options(self, schema: dict[str, Any]) -> Sequence[dict[str, Any]] | None:
        """Return the options that a part has by `anyOf` or `oneOf`, the same for the same part; None if it has none, or
        says more than can be added to each.
        """
        key = _choosing(schema)
        if key is None:
            return None
        if id(schema) not in self._chosen:
            options = [self.resolved(option) for option in schema[key]]
            rest = {name: value for name, value in schema.items() if name != key}
            self._chosen[id(schema)] = schema, _each_joined(rest, options) if keywords(rest) else options
        return self._chosen[id(schema)][1]

    def _of_all(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a part that says several by `allOf` as one schema; the part itself if that cannot be."""
        if id(schema) not in self._joined:
            self._joined[id(schema)] = schema, schema  # for what refers to itself
            joined: dict[str, Any] | None = {name: value for name, value in schema.items() if name != "allOf"}
            for part in map(self.resolved, schema["allOf"]):
                joined = None if joined is None else _joined(joined, part)
            self._joined[id(schema)] = schema, schema if joined is None else joined
        return self._joined[id(schema)][1]

    def alone(self, schema: Any) -> dict[str, Any]:
        """Return a part as a schema of its own, which holds all that it refers to."""
        part, references = self._moved(schema if isinstance(schema, dict) else ANYTHING)
        shared: dict[str, Any] = {}
        for reference in references:  # the list grows in the loop
            if (number := str(self._numbers[reference])) not in shared:
                if reference not in self._definitions:
                    self._definitions[reference] = self._moved(target_of(self.root, reference))
                shared[number], more = self._definitions[reference]
                references += more
        return {**part, "$defs": shared} if shared else part

    def _moved(self, schema: Any) -> tuple[Any, list[str]]:
        """Return a part whose references lead into the definitions of a schema of its own, and those references as they
        were.
        """
        references: list[str] = []

        def moved(reference: str) -> str:
            if target_of(self.root, reference) is None:
                return reference
            references.append(reference)
            return f"#/$defs/{self._numbers.setdefault(reference, len(self._numbers))}"

        return _with_references(schema, moved), references


def keywords(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that forbid values."""
    return {key for keys in _KEYWORDS.values() for key in keys if key in schema}


def named(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the properties that a schema names, and the names of those that it requires."""
    properties, required = schema.get("properties"), schema.get("required")
    return properties if isinstance(properties, dict) else {}, required if isinstance(required, list) else []


def is_of(value: Any, kind: str) -> bool:
    """Return whether a value is of a kind, which is a `type` of schemas."""
    if isinstance(value, float):
        return kind == "number" or (kind == "integer" and value.is_integer())
    return isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def of_one_kind(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema of several kinds of values, or of listed ones, as one schema for each kind."""
    kinds = _kinds(schema)
    if "const" not in schema and "enum" not in schema:
        return [schema] if [schema.get("type")] == kinds or not kinds else [{**schema, "type": kind} for kind in kinds]
    options = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(options, list):
        return [{"enum": options}]  # which is no schema
    rest = {key: value for key, value in schema.items() if key != "const"}
    listed = {kind: [one for one in options if is_of(one, kind)] for kind in kinds}
    return [{**rest, "type": kind, "enum": values} for kind, values in listed.items() if values]


def _kinds(schema: dict[str, Any]) -> list[str]:
    """Return the kinds of values that a schema names, or else those that it speaks of; none if it cannot be told."""
    said = schema.get("type")
    if said is not None:
        return [kind for kind in (said if isinstance(said, list) else [said]) if isinstance(kind, str)]
    if "const" in schema or "enum" in schema or not (found := keywords(schema)):
        return [kind for kind in _TYPES if kind != "integer"]
    spoken = [kind for kind, keys in _KEYWORDS.items() if found.intersection(keys)]
    return [] if "" in spoken else spoken


def _choosing(schema: Mapping[str, Any]) -> str | None:
    """Return the keyword by which a schema has options, if it has any."""
    return next((key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)


def _each_joined(schema: dict[str, Any], options: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the options joined with a schema; None if one cannot be, or has options of its own."""
    joined = [_joined(schema, option) for option in options]
    plain = [one for one in joined if one is not None and not _choosing(one)]
    return plain if len(plain) == len(joined) else None


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Return a schema of what follows both schemas, None if they differ about a keyword other than names of objects."""
    joined = {**one, **other}
    for key in keywords(one) & keywords(other):
        if key == "required" and isinstance(one[key], list) and isinstance(other[key], list):
            joined[key] = [*one[key], *other[key]]
        elif key == "properties" and isinstance(one[key], dict) and isinstance(other[key], dict):
            if any(one[key][name] != other[key][name] for name in one[key].keys() & other[key].keys()):
                return None
            joined[key] = {**one[key], **other[key]}
        elif one[key] != other[key]:
            return None
    return joined


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
