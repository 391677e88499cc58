"""What a grammar cannot follow of a JSON schema is left out and named, and nothing that it allows is forbidden."""

from __future__ import annotations

import copy
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="pip install 'talon-decoding[grammar]'")
from engine.core.errors import RequestError
from engine.core.grammar import Grammar
from engine.sampling import relaxed_schema
from engine.sampling.matcher import check
from engine.sampling.relaxed_schema import KEYWORDS, relaxed

TEXT = {"type": "string"}
AHEAD = {"type": "string", "pattern": "^(?=.*a).*$"}
SHORT_AND_LONG = [TEXT, {"type": "string", "minLength": 3}]


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "followed", "left_out"),
    [
        (of(a={"type": "object", "propertyNames": {"pattern": "^a"}}), of(a={"type": "object"}), ["a.propertyNames"]),
        (of(a={"type": "array", "uniqueItems": True}), of(a={"type": "array"}), ["a.uniqueItems"]),
        (of(a={"not": TEXT}), of(a={}), ["a.not"]),
        (of(a={"contains": TEXT, "minContains": 2}), of(a={}), ["a.contains", "a.minContains"]),
        (of(a=AHEAD), of(a=TEXT), ["a.pattern"]),
        (of(a={"type": "string", "pattern": "(a)\\1"}), of(a=TEXT), ["a.pattern"]),
        (of(a={"items": [TEXT, AHEAD]}), of(a={"items": [TEXT, TEXT]}), ["a.items[1].pattern"]),
        (of(a={"oneOf": SHORT_AND_LONG}), of(a={"anyOf": SHORT_AND_LONG}), ["a.oneOf"]),
        (
            of(a={"oneOf": SHORT_AND_LONG, "anyOf": [TEXT, {"type": "null"}]}),
            of(a={"anyOf": [TEXT, {"type": "null"}], "allOf": [{"anyOf": SHORT_AND_LONG}]}),
            ["a.oneOf"],
        ),
        (of(a={"oneOf": [AHEAD, {"type": "null"}]}), of(a={"oneOf": [TEXT, {"type": "null"}]}), ["a.oneOf[0].pattern"]),
    ],
)  # fmt: skip
def test_what_the_library_cannot_follow_is_left_out(schema: Any, followed: Any, left_out: list[str]) -> None:
    before = copy.deepcopy(schema)
    with pytest.raises(RequestError):
        check(Grammar(json_schema=schema).validate())
    assert relaxed(schema) == (followed, tuple(f".properties.{path}" for path in left_out))
    check(Grammar(json_schema=followed).validate())
    assert schema == before


def test_definitions_are_relaxed_too() -> None:
    schema = of(a={"$ref": "#/$defs/Long"}) | {"$defs": {"Long": {"oneOf": SHORT_AND_LONG}, "Not": {"not": TEXT}}}
    found = relaxed(schema)
    assert found.left_out == (".$defs.Not.not", ".$defs.Long.oneOf")
    assert found.schema["$defs"] == {"Long": {"anyOf": SHORT_AND_LONG}, "Not": {}}


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({"if": {"required": ["a"]}, "then": {"properties": {"b": TEXT}}}, (".if", ".then")),
        ({"patternProperties": {"^(?=b)": TEXT}}, (".patternProperties",)),
        (
            {"patternProperties": {"^(?=b)": TEXT}, "additionalProperties": False},
            (".patternProperties", ".additionalProperties"),
        ),
        ({"patternProperties": {"^b": TEXT, "^bb": {}}}, (".patternProperties",)),
    ],
)
def test_an_object_whose_other_properties_a_lost_keyword_names_stays_open(more: Any, left_out: Any) -> None:
    assert relaxed(of(a=TEXT) | more) == (of(a=TEXT) | {"additionalProperties": True}, left_out)


@pytest.mark.parametrize(
    "schema",
    [
        of(a={"type": "integer", "minimum": 3}),
        of(a={"oneOf": [TEXT, {"type": "integer"}]}),
        of(a=TEXT) | {"patternProperties": {"^b": TEXT}, "additionalProperties": False},
        of(uniqueItems={"enum": [{"not": 1}]}) | {"$defs": {"not": TEXT}},
        of(a={"not": TEXT}, b={"const": "x" * 270_000}),  # too long to be read
    ],
)
def test_what_a_grammar_follows_stays_as_it_is(schema: Any) -> None:
    assert relaxed(schema) == (schema, ())


@pytest.mark.parametrize(
    "idle",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"if": {"minLength": 3}},
        {"then": {"minLength": 3}},
        {"minContains": 2},
        {"not": False},
    ],
)
def test_a_keyword_that_is_always_true_is_none(idle: Any) -> None:
    check(Grammar(json_schema=of(a=idle)).validate())
    assert relaxed(of(a=idle)) == (of(a={}), ())


def test_what_is_wrong_is_left_to_be_refused() -> None:
    wrong = of(a={"type": "x"}, b={"not": TEXT})
    assert relaxed(wrong).schema == of(a={"type": "x"}, b={})
    with pytest.raises(RequestError, match="Invalid type: x"):
        check(Grammar(json_schema=relaxed(wrong).schema).validate())


def test_large_and_deep_schemas_take_no_long_time() -> None:
    started_s = time.perf_counter()
    many = relaxed(of(**{f"p{number}": {"not": {}} for number in range(3000)})).left_out
    assert len(many) == 33 and many[-1] == ": 2968 more keywords"
    assert relaxed(of(**{f"p{number}": AHEAD for number in range(256)})).left_out[-1] == ": 224 more keywords"
    assert relaxed(of(**{f"p{number}": AHEAD for number in range(257)})).left_out == ()
    for depth in (50, 200, 600):
        deep: dict[str, Any] = {"not": {}}
        for _ in range(depth):
            deep = {"items": deep}
        (name, *others) = relaxed(of(a=deep)).left_out or [".not"]
        assert name.endswith(".not") and len(name) < 210 and not others
    assert time.perf_counter() - started_s < 20


def test_a_long_name_above_many_keywords_takes_its_memory_once() -> None:
    long = "x" * 100_000
    schema = of(**{long: of(**{f"p{number}": {"not": {}, "uniqueItems": True} for number in range(2000)})})
    tracemalloc.start()
    found = relaxed(schema)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 30_000_000 and len(found.left_out) == 33 and found.left_out[-1] == ": 3968 more keywords"
    assert found.left_out[0].endswith(".p0.not") and max(map(len, found.left_out)) < 210


def test_long_schemas_and_expressions_are_not_remembered() -> None:
    kept = relaxed_schema._remembered.cache_info().currsize, relaxed_schema._remembered_reads.cache_info().currsize
    relaxed(of(a={"pattern": "^" + "x" * 20_000}, b={"const": "y" * 20_000, "not": {}}))
    assert kept == (
        relaxed_schema._remembered.cache_info().currsize,
        relaxed_schema._remembered_reads.cache_info().currsize,
    )


def test_the_page_of_what_is_ignored_names_every_keyword() -> None:
    page = (Path(__file__).parents[3] / "docs" / "ignored.md").read_text("utf8")
    assert [keyword for keyword in KEYWORDS if f"`{keyword}`" not in page] == []
