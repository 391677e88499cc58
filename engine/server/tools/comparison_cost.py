"""Bounds the work of comparing a value with a schema that a client chose.

References that are written twice at each of twenty levels are a million schemas, and the library visits them all. So
its steps are counted first, in the same order of magnitude, and no further than a limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

_MOST_STEPS = 10_000
_SAME = ("not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies")
"""Keywords whose schemas apply to the same value."""
_PARTS = (
    "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties", "items", "prefixItems",
    "additionalItems", "contains", "unevaluatedItems",
)  # fmt: skip
"""Keywords whose schemas apply to parts of the value; each is counted for every part."""
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_BASES = ("$id", "id")


def steps_of(schema: dict[str, Any], value: Any) -> int | None:
    """Return about how many steps the comparison takes, None if they are too many or a reference leads elsewhere."""
    try:
        # these cost before any value is compared
        stack = [(schema, value), *((inner, None) for inner in _unevaluated(schema))]
        steps = 0
        while stack and steps <= _MOST_STEPS:
            asked, part = stack.pop()
            if isinstance(asked, dict):
                steps += 1 + _listed(asked)
                for following in _following(asked, part, schema):
                    steps += 1
                    if steps > _MOST_STEPS:
                        break
                    stack.append(following)
        return steps if steps <= _MOST_STEPS else None
    except (KeyError, IndexError, ValueError, TypeError, AttributeError):  # not a schema, or no such place
        return None


def _unevaluated(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas for which the library expands references before it sees a value. Raises ValueError for a schema
    within the root that has an address of its own, from which its references would count.
    """
    stack: list[Any] = [root]
    while stack:
        inner = stack.pop()
        if isinstance(inner, dict):
            if inner is not root and any(isinstance(inner.get(key), str) for key in _BASES):
                raise ValueError("an address within the schema")
            if any(key in inner for key in _UNEVALUATED):
                yield inner
        stack += inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()


def _listed(asked: dict[str, Any]) -> int:
    """Return how many values and names a schema lists that may each be compared."""
    names = (*asked.get("dependentRequired", {}).values(), *asked.get("dependencies", {}).values())
    return len(asked.get("enum", ())) + len(asked.get("required", ())) + sum(map(len, names))


def _following(asked: dict[str, Any], value: Any, root: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the schemas that a schema applies, each with what it applies to."""
    same = [(_found(asked[key], root), value) for key in _REFERENCES if key in asked]
    same += [(inner, value) for key in _SAME if key in asked for inner in _schemas(key, asked[key])]
    parts = len(value) if isinstance(value, dict | list) else 0
    times = 2 + parts if any(key in asked for key in _UNEVALUATED) else 1  # once more for every part
    yield from itertools.chain.from_iterable(itertools.repeat(same, times if same else 0))
    for inner in (inner for key in _PARTS if key in asked for inner in _schemas(key, asked[key])):
        yield from ((inner, part) for part in _parts(value))
    if isinstance(value, dict):
        named = asked.get("properties", {})
        yield from ((named[name], part) for name, part in value.items() if name in named)


def _parts(value: Any) -> Iterable[Any]:
    """Return a list's values, or an object's names and values."""
    if isinstance(value, dict):
        return itertools.chain(value, value.values())
    return value if isinstance(value, list) else ()


def _schemas(key: str, held: Any) -> Iterator[Any]:
    """Yield the schemas that a keyword holds: one, several in a list, or several by their names."""
    if key in ("patternProperties", "dependentSchemas", "dependencies"):
        yield from held.values()
    elif isinstance(held, list):
        yield from held
    else:
        yield held


def _found(reference: str, root: dict[str, Any]) -> Any:
    """Return the schema to which a reference within the document leads. Raises ValueError for another reference."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError("a reference to a name or another document")
    found: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found
