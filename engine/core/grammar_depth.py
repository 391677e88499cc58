"""How far the rules of a grammar, and the references of a schema, lead one after another. The library recurses along
them, and a full stack would end the process, with the requests of others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote

MOST_LEVELS = 1200
"""Levels of a schema along its references; the library's stack holds 1,800."""
MOST_RULES = 2000
"""Rules of a grammar that refer to one another in turn; the library's stack holds 2,200."""
_ELSEWHERE = "elsewhere"  # which is no reference
_MOST_WALKED = 200_000  # objects of all parts together, a tenth of a second
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?:\.\d+)?[ \t]*:(?!:=)", re.MULTILINE)
_GBNF_RULE = re.compile(r"^[ \t]*([A-Za-z][\w-]*)[ \t]*::=", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\]|\\.)+/|//[^\n]*|#[^\n]*', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_SCHEMA = re.compile(r"%json\s*(?=\{)")


def schema_levels(schema: Mapping[str, Any]) -> int:
    """Return how many levels of a schema lie along its longest chain of references, or more where these form circles,
    lead elsewhere than to a place in the schema, or lead into large parts again and again.
    """
    whole = [*islice(_places(schema), _MOST_WALKED)]
    references = {reference for value, _ in whole for reference in _references(value)}
    moved = any(isinstance(value.get(key), str) for value, level in whole if level > 1 for key in ("$id", "id"))
    parts = {} if moved else {name: part for name in references if (part := target_of(schema, name)) is not None}
    depth, walked = max(level for _, level in whole), len(whole)
    leads = {_ELSEWHERE: {_ELSEWHERE, *parts}}
    levels = {_ELSEWHERE: depth * len(references - parts.keys())}
    itself = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    for name, part in (parts | {"#": itself}).items():
        found = [*islice(_places(part), max(0, _MOST_WALKED - walked))]
        if (walked := walked + len(found)) >= _MOST_WALKED:
            return MOST_LEVELS + 1
        named = {reference for value, _ in found for reference in _references(value)}
        leads[name] = {reference if reference in parts else _ELSEWHERE for reference in named}
        levels[name] = max((level for _, level in found), default=1)
    return _longest(leads, levels)


def chained_rules(grammar: str) -> int:
    """Return how many rules of a grammar in Lark or GBNF refer to one another in turn, or more where these form
    circles.
    """
    plain = _QUOTED.sub('""', grammar)
    begins = [*(_GBNF_RULE if "::=" in plain else _RULE).finditer(plain)]
    ends = [*(match.start() for match in begins), len(plain)][1:]
    bodies = {match[1]: plain[match.end() : end] for match, end in zip(begins, ends, strict=True)}
    leads = {name: {one for one in _NAME.findall(body) if one in bodies} for name, body in bodies.items()}
    return _longest(leads, dict.fromkeys(leads, 1))


def schemas_within(grammar: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas that a grammar in Lark holds; what is none, the library refuses."""
    decoder = json.JSONDecoder()
    for found in _SCHEMA.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except (ValueError, RecursionError):
            return


def _places(part: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each object within a part, and at which level it lies."""
    waiting = [(part, 1)]
    while waiting:
        value, level = waiting.pop()
        if isinstance(value, dict):
            yield value, level
        inner = value.values() if isinstance(value, dict) else value
        waiting += [(one, level + 1) for one in inner if isinstance(one, dict | list)]


def _references(value: Mapping[str, Any]) -> list[str]:
    return [value[key] for key in ("$ref", "$dynamicRef", "$recursiveRef") if isinstance(value.get(key), str)]


def target_of(schema: Any, reference: str) -> Any:
    """Return what a reference leads to, None if that is nothing within the schema, or is named in another way than by
    its place.
    """
    if reference != "#" and not reference.startswith("#/"):
        return None
    for key in unquote(reference).split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            at = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else len(schema)
            schema = schema[at] if at < len(schema) and str(at) == name else None
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _longest(leads: Mapping[str, set[str]], weights: Mapping[str, int]) -> int:
    """Return the weight of the heaviest path. Nodes that lead to each other count together, wherever a path enters."""
    longest, best = dict[str, int](), 0
    for circle in _circles(leads):  # what a circle leads to comes before it
        beyond = max((longest[to] for node in circle for to in leads[node] if to in longest), default=0)
        heaviest = beyond + sum(weights[node] for node in circle)
        longest.update(dict.fromkeys(circle, heaviest))
        best = max(best, heaviest)
    return best


def _circles(leads: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of a graph, each after those that it leads to (Tarjan)."""
    number, low = dict[str, int](), dict[str, int]()
    path, places = list[str](), dict[str, int]()  # nodes whose component is not complete, and where each is in it

    def entered(node: str) -> tuple[str, Iterator[str]]:
        number[node] = low[node] = len(number)
        places[node] = len(path)
        path.append(node)
        return node, iter(leads[node])

    for root in leads:
        walk = [] if root in number else [entered(root)]
        while walk:
            node, following = walk[-1]
            if (new := next((to for to in following if to not in number), None)) is not None:
                walk.append(entered(new))
                continue
            walk.pop()
            low[node] = min([low[node], *(low[to] for to in leads[node] if to in places)])
            if low[node] == number[node]:
                circle = path[places[node] :]
                del path[places[node] :]
                for one in circle:
                    del places[one]
                yield circle
