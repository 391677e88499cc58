"""A JSON schema as far as a grammar can follow it: keywords that the library cannot follow are left out, and named.

Leaving a keyword out never forbids what the schema allows. What the library refuses for another reason stays as it is,
and is refused by `engine.sampling.matcher.check`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.core.errors import RequestError
from engine.core.grammar import Grammar
from engine.sampling.matcher import refusal_of, without_annotations

_KEPT = 128  # schemas
_PATTERNS = 1024
_MOST_ASKED = 256  # keywords of one schema about which the library is asked one by one; with more it is left as it is
KEYWORDS: dict[str, dict[str, Any]] = {
    "propertyNames": {"propertyNames": {"maxLength": 9}},
    "uniqueItems": {"uniqueItems": True},
    "not": {"not": {}},
    "if": {"if": {}, "then": {}},
    "then": {"if": {}, "then": {}},
    "else": {"if": {}, "else": {}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "contains": {"contains": {}},
    "minContains": {"contains": {}, "minContains": 1},
    "maxContains": {"contains": {}, "maxContains": 1},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#"},
    "$recursiveRef": {"$recursiveRef": "#"},
}
"""Keywords that the library may not know, each with a schema to ask it with."""
_OPENING = (
    "if", "then", "else", "dependentSchemas", "dependencies", "patternProperties", "propertyNames",
    "unevaluatedProperties",
)  # fmt: skip
"""Keywords that may speak of properties which a schema does not name otherwise."""
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf")
"""Keywords that hold a schema, or several in a list."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by their names."""


class RelaxedSchema(NamedTuple):
    """schema: what a grammar follows. left_out: the paths of the keywords that it does not follow, from the root."""

    schema: dict[str, Any]
    left_out: tuple[str, ...] = ()


def relaxed(schema: dict[str, Any]) -> RelaxedSchema:
    """Return the schema without the keywords that the library cannot follow."""
    text, left_out = _relaxed(json.dumps(schema))
    return RelaxedSchema(json.loads(text), left_out)


@functools.lru_cache(maxsize=_KEPT)
def _relaxed(text: str) -> tuple[str, tuple[str, ...]]:
    left_out: list[str] = []
    try:
        schema = json.loads(without_annotations(text))
        if _fits(schema) or sum(map(text.count, ('"oneOf"', '"pattern"', '"patternProperties"'))) > _MOST_ASKED:
            return json.dumps(schema), ()
        schema = _without_unknown(schema, "", left_out)
        if not _fits(schema):
            schema = _with_any_of(schema, schema, "", left_out)
        return json.dumps(schema), tuple(left_out)
    except RecursionError:  # the library refuses it
        return text, ()


def _without_unknown(schema: Any, path: str, left_out: list[str]) -> Any:
    """Return the schema without keywords that the library does not know, and expressions that it cannot read."""
    if not isinstance(schema, dict):
        return schema
    unknown = {key for key, value in schema.items() if not _followed(key, value)}
    if "patternProperties" in unknown and schema.get("additionalProperties", True) is not True:
        unknown.add("additionalProperties")  # which would forbid what they allow
    left_out += [f"{path}.{key}" for key in schema if key in unknown]
    kept = {key: value for key, value in schema.items() if key not in unknown}
    kept = _changed(kept, path, lambda inner, at: _without_unknown(inner, at, left_out))
    if "properties" in kept and any(key in _OPENING for key in unknown):
        kept.setdefault("additionalProperties", True)
    return kept


def _with_any_of(schema: Any, root: dict[str, Any], path: str, left_out: list[str]) -> Any:
    """Return the schema with `anyOf` in the place of each `oneOf` whose options may hold at once."""
    if not isinstance(schema, dict):
        return schema
    kept = _changed(schema, path, lambda inner, at: _with_any_of(inner, root, at, left_out))
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if "oneOf" in kept and not _fits({"oneOf": kept["oneOf"], **shared}):
        options = {"anyOf": kept.pop("oneOf")}
        left_out.append(f"{path}.oneOf")
        kept |= options if "anyOf" not in kept else {"allOf": [*kept.get("allOf", ()), options]}
    return kept


def _followed(key: str, value: Any) -> bool:
    """Return whether the library can follow a keyword, as far as can be told from its value alone."""
    if key == "pattern" and isinstance(value, str):
        return _reads((value,))
    if key == "patternProperties" and isinstance(value, dict):
        return _reads(tuple(value))
    return key not in _unknown()


@functools.cache
def _unknown() -> frozenset[str]:
    """Return the keywords that the library does not know."""
    return frozenset(key for key, schema in KEYWORDS.items() if not _fits(schema))


@functools.lru_cache(maxsize=_PATTERNS)
def _reads(patterns: tuple[str, ...]) -> bool:
    """Return whether the library can read regular expressions, and tell them apart where they are several."""
    return _fits({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})


def _fits(schema: dict[str, Any]) -> bool:
    try:
        return not refusal_of(Grammar(json_schema=schema).validate())
    except RequestError:
        return False


def _changed(schema: dict[str, Any], path: str, change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return the schema with each schema that is a direct part of it changed; `change` gets it with its path."""
    kept = dict(schema)
    for key, value in schema.items():
        at = f"{path}.{key}"
        if key in _NAMED and isinstance(value, dict):
            kept[key] = {name: change(inner, f"{at}.{name}") for name, inner in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            kept[key] = [change(inner, f"{at}[{number}]") for number, inner in enumerate(value)]
        elif key in _SCHEMAS:
            kept[key] = change(value, at)
    return kept
