from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from engine.core.errors import RequestError
from engine.core.grammar import Grammar
from engine.core.grammar_depth import MOST_LEVELS, chained_rules, schema_levels, schemas_within


def chain(count: int) -> dict[str, Any]:
    """Return a schema of definitions each of which refers to the next one."""
    parts: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": parts | {f"a{count}": {"type": "string"}}}


def rules(count: int, sign: str = ":") -> str:
    first = "start" if sign == ":" else "root"
    following = "".join(f'a{i} {sign} "x" a{i + 1}\n' for i in range(count))
    return f'{first} {sign} a0\n{following}a{count} {sign} "y"\n'


def test_levels_are_those_along_the_longest_chain_of_references() -> None:
    assert schema_levels(chain(10)) == 1 + 11
    deep = {"properties": {"x": {"items": {"$ref": "#/$defs/a"}}}, "$defs": {"a": {"anyOf": [{"type": "null"}]}}}
    assert schema_levels(deep) == 4 + 3
    wide = {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(5000)], "$defs": {str(i): {} for i in range(5000)}}
    assert schema_levels(wide) == 3 + 1


def named_otherwise(way: str, count: int) -> dict[str, Any]:
    """Return a chain whose definitions are found by their places in a list, by escapes, by anchors or by addresses, or
    refer from a property with the name of a keyword.
    """

    def part(number: int, reference: str) -> dict[str, Any]:
        own = {"anchor": {"$anchor": f"a{number}"}, "address": {"$id": f"http://x/a{number}"}}.get(way, {})
        inner = {"$ref": reference}
        return own | ({"properties": {"definitions": inner}} if way == "property" else {"items": inner})

    ways = {"list": "#/$defs/a/{}", "escape": "#/$defs/%61{}", "anchor": "#a{}", "address": "http://x/a{}"}
    refer = ways.get(way, "#/$defs/a{}").format
    parts = [part(number, refer(number + 1)) for number in range(count)] + [part(count, "#")]
    return {"$ref": refer(0), "$defs": {"a": parts} if way == "list" else {f"a{i}": one for i, one in enumerate(parts)}}


@pytest.mark.parametrize("way", ["list", "escape", "anchor", "address", "property"])
def test_a_chain_is_as_long_however_its_parts_are_referred_to(way: str) -> None:
    Grammar(json_schema=named_otherwise(way, 20)).validate()
    with pytest.raises(RequestError, match="references lead over"):
        Grammar(json_schema=named_otherwise(way, 1000)).validate()


def test_a_schema_that_refers_to_itself_counts_once() -> None:
    assert schema_levels({"properties": {"children": {"items": {"$ref": "#"}}}}) == 4


def test_a_schema_that_leads_into_large_parts_again_and_again_takes_no_long_time_to_count() -> None:
    leaves: Any = [{} for _ in range(20_000)]
    schema: dict[str, Any] = {"anyOf": leaves}
    path = "#"
    for _ in range(100):
        schema, path = {"not": schema}, f"{path}/not"
        leaves.append({"$ref": path})
    assert schema_levels(schema) > MOST_LEVELS


@pytest.mark.parametrize("sign", [":", "::="])
def test_rules_are_counted_along_their_longest_chain(sign: str) -> None:
    assert chained_rules(rules(10, sign)) == 12
    assert chained_rules(rules(10, sign).replace('"y"', f'"a0 a1" a{10}')) == 12


def test_a_rule_behind_an_expression_of_several_lines_is_counted() -> None:
    hidden = "".join(f"a{i}: /x\n/ a{i + 1} /y\n/\n" for i in range(10))
    assert chained_rules(f'start: a0\n{hidden}a10: "y"\n') == 12


def test_schemas_within_a_grammar_are_found() -> None:
    text = f'start: "a" %json {json.dumps({"type": "object"})} | b\nb: %json {json.dumps(chain(2))} "%json"'
    assert [*schemas_within(text)] == [{"type": "object"}, chain(2)]


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar(json_schema=chain(3000)), "grammar.json_schema: references lead over"),
        (Grammar(grammar=rules(3000)), "grammar.grammar: over 2000 rules"),
        (Grammar(grammar=rules(3000, "::=")), "grammar.grammar: over 2000 rules"),
        (Grammar(grammar=f"start: %json {json.dumps(chain(3000))}"), "grammar.grammar: references lead over"),
    ],
    ids=["schema", "lark", "gbnf", "schema within"],
)
def test_what_would_fill_the_librarys_stack_is_refused(grammar: Grammar, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        grammar.validate()


@pytest.mark.parametrize(
    "made",
    [
        "Grammar(json_schema=chain(MOST_LEVELS - 2))",
        "Grammar(grammar=rules(MOST_RULES - 2))",
        "Grammar(grammar=rules(MOST_RULES - 2, '::='))",
    ],
)
def test_the_library_takes_what_is_not_refused(made: str) -> None:
    """Its stack is that of a thread, and a process that it ends is one of the test's own."""
    pytest.importorskip("llguidance", reason="pip install 'talon-decoding[grammar]'")
    program = f"""
import threading
from engine.sampling.matcher import check
from tests.engine.core.test_grammar_depth import *
thread = threading.Thread(target=lambda: check({made}.validate()))
thread.start()
thread.join()
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
