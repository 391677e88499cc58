"""A JSON schema as far as a grammar can follow it: keywords that the library cannot follow are left out, and named.

Leaving a keyword out never forbids what the schema allows. What the library refuses for another reason stays as it is,
and is refused by `engine.sampling.matcher.check`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.core.errors import RequestError, printable
from engine.core.grammar import Grammar
from engine.sampling.matcher import refusal_of, without_annotations

_KEPT = 128  # schemas that are kept
_PATTERNS = 1024
_MOST_KEPT = 32_768  # characters of a schema, or of expressions, that is remembered
_LONGEST = 262_144  # characters of a schema; a longer one is left as it is
_MOST_NAMES = 32
_MOST_PATH = 200  # characters: names in it are the client's
# keywords of one schema about which the library is asked one by one; with more the schema is left as it is
_MOST_ASKED = 256
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
    """A schema that a grammar can follow. schema: what a grammar follows. left_out: the paths of the first keywords
    that it does not follow, from the root; the last says how many more there are.
    """

    schema: dict[str, Any]
    left_out: tuple[str, ...] = ()


def relaxed(schema: dict[str, Any]) -> RelaxedSchema:
    """Return the schema without the keywords that the library cannot follow."""
    text = json.dumps(schema)
    text, left_out = (_remembered if len(text) <= _MOST_KEPT else _relaxed)(text)
    return RelaxedSchema(json.loads(text), left_out)


class _Names(list[str]):
    """The first paths that were added; further ones are only counted."""

    more = 0

    def add(self, path: str) -> None:
        if len(self) < _MOST_NAMES:
            self.append(path)
        else:
            self.more += 1

    def said(self) -> tuple[str, ...]:
        return (*self, f": {self.more} more keywords") if self.more else tuple(self)


def _relaxed(text: str) -> tuple[str, tuple[str, ...]]:
    left_out = _Names()
    try:
        schema = json.loads(without_annotations(text))
        if (
            len(text) > _LONGEST
            or _fits(schema)
            or sum(map(text.count, ('"oneOf"', '"pattern"', '"patternProperties"'))) > _MOST_ASKED
        ):
            return json.dumps(schema), ()
        schema = _without_unknown(schema, "", left_out)
        if not _fits(schema):
            schema = _with_any_of(schema, schema, "", left_out)
        return json.dumps(schema), left_out.said()
    except RecursionError:  # the library refuses it
        return text, ()


_remembered = functools.lru_cache(maxsize=_KEPT)(_relaxed)


def _without_unknown(schema: Any, path: str, left_out: _Names) -> Any:
    """Return the schema without keywords that the library does not know, and expressions that it cannot read."""
    if not isinstance(schema, dict):
        return schema
    unknown = {key for key, value in schema.items() if not _followed(key, value)}
    if "patternProperties" in unknown and schema.get("additionalProperties", True) is not True:
        unknown.add("additionalProperties")  # this would forbid what they allow
    for key in (key for key in schema if key in unknown):
        left_out.add(_longer(path, f".{key}"))
    kept = {key: value for key, value in schema.items() if key not in unknown}
    kept = _changed(kept, path, lambda inner, at: _without_unknown(inner, at, left_out))
    if "properties" in kept and any(key in _OPENING for key in unknown):
        kept.setdefault("additionalProperties", True)
    return kept


def _with_any_of(schema: Any, root: dict[str, Any], path: str, left_out: _Names) -> Any:
    """Return the schema with `anyOf` in the place of each `oneOf` whose options may hold at once."""
    if not isinstance(schema, dict):
        return schema
    kept = _changed(schema, path, lambda inner, at: _with_any_of(inner, root, at, left_out))
    shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if "oneOf" in kept and not _fits({"oneOf": kept["oneOf"], **shared}):
        options = {"anyOf": kept.pop("oneOf")}
        left_out.add(_longer(path, ".oneOf"))
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


def _reads(patterns: tuple[str, ...]) -> bool:
    """Return whether the library can read regular expressions, and tell them apart where they are several."""
    return (_remembered_reads if sum(map(len, patterns)) <= _MOST_KEPT // 8 else _asked_reads)(patterns)


def _asked_reads(patterns: tuple[str, ...]) -> bool:
    return _fits({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})


_remembered_reads = functools.lru_cache(maxsize=_PATTERNS)(_asked_reads)


def _fits(schema: dict[str, Any]) -> bool:
    try:
        return not refusal_of(Grammar(json_schema=schema).validate())
    except RequestError:
        return False


def _changed(schema: dict[str, Any], path: str, change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return the schema with each schema that is a direct part of it changed; `change` gets it with its path."""
    kept = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            at = _longer(path, f".{key}")
            kept[key] = {name: change(inner, _longer(at, f".{name}")) for name, inner in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            at = _longer(path, f".{key}")
            kept[key] = [change(inner, _longer(at, f"[{number}]")) for number, inner in enumerate(value)]
        elif key in _SCHEMAS:
            kept[key] = change(value, _longer(path, f".{key}"))
    return kept


def _longer(path: str, part: str) -> str:
    """Return a path with a part more, without its middle where it is long."""
    return printable(path + part, _MOST_PATH)
