"""Schemas as their generators write them, in every way of writing arguments: the grammar takes what they allow and
nothing else, and the reader gives back what was written.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.core.errors import RequestError
from engine.text.answer_format import TOOL_FORMATS, ToolFormat
from engine.text.answer_reader import AnswerReader
from engine.text.argument_schema import ArgumentSchema
from engine.text.tool_grammar import Tool, Wanted, tool_grammar

pytest.importorskip("llguidance", reason="pip install 'talon-decoding[grammar]'")
from tests.engine.text.test_tool_formats import calls_of, format_of, gemma, matcher, read, takes, written

WAYS = ("hermes", "harmony", "qwen3-coder", "glm-compact", "gemma", "gemma4", "lfm2")
"""A format of each way of writing arguments, or two where marks of both may be tokens or not."""
FORMATS = pytest.mark.parametrize("tools", [one for one in TOOL_FORMATS if one.name in WAYS], ids=lambda one: one.name)
GEMMA = pytest.mark.parametrize(
    "tools", [one for one in TOOL_FORMATS if one.arguments == "gemma"], ids=lambda one: one.name
)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TEXTS = {"type": "array", "items": {"type": "string"}}
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}


def of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The schema of an object that needs all of its properties."""
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def allows(tools: ToolFormat, schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether a call with these arguments is in the grammar; if so, the reader must find them in it."""
    tool, text = Tool("call", schema), written(tools, [("call", arguments)])
    if takes(format_of(tools, True), Wanted([tool], "required", many=False), text) is not None:
        return False
    assert calls_of(read(format_of(tools, True), text, tools=[tool])) == [("call", arguments)]
    return True


@FORMATS
def test_a_reference_may_lead_to_another_property(tools: ToolFormat) -> None:
    schema = of({"from": POINT, "to": {"$ref": "#/properties/from"}})
    assert allows(tools, schema, {"from": {"x": 1}, "to": {"x": 2}})
    assert not allows(tools, schema, {"from": {"x": 1}, "to": {"y": 2}})


@FORMATS
def test_a_reference_may_lead_into_a_list(tools: ToolFormat) -> None:
    schema = of({"from": {"anyOf": [POINT, {"type": "boolean"}]}, "to": {"$ref": "#/properties/from/anyOf/0"}})
    assert allows(tools, schema, {"from": True, "to": {"x": 2}})
    assert not allows(tools, schema, {"from": True, "to": True})


@FORMATS
def test_a_reference_to_the_root_is_the_whole_schema(tools: ToolFormat) -> None:
    leaf = {"name": "b", "children": []}
    assert allows(tools, TREE, {"name": "a", "children": [leaf, leaf]})
    assert not allows(tools, TREE, {"name": "a", "children": [[leaf]]})


def test_only_references_are_moved_where_a_part_stands_alone() -> None:
    """Names and values may look like references."""
    value = {"$ref": "#/properties/a"}
    part = {"properties": {"$ref": value}, "const": value, "enum": [value], "default": value, "items": value}
    found = ArgumentSchema({"properties": {"a": POINT}}).alone(part)
    moved = {"$ref": "#/$defs/0"}
    assert found == part | {"properties": {"$ref": moved}, "items": moved, "$defs": {"0": POINT}}


def test_a_part_holds_what_its_references_refer_to() -> None:
    shared = {"a/b": {"$ref": "#/$defs/c%20d"}, "c d": {"items": {"$ref": "#"}}, "e": {}}
    root = {"$id": "https://example.org", "items": {"$ref": "#/$defs/a~1b"}, "$defs": shared}
    found = ArgumentSchema(root).alone(root["items"])
    refers = [{"$ref": f"#/$defs/{number}"} for number in range(3)]
    assert found == refers[0] | {"$defs": {"0": refers[1], "1": {"items": refers[2]}, "2": {"items": refers[0]}}}


def test_a_reference_that_leads_nowhere_stays_as_it_is() -> None:
    for reference in ("#/$defs/none", "#/properties/a/b/c", "#anchor", "https://example.org"):
        assert ArgumentSchema({"properties": {"a": {}}}).alone({"$ref": reference}) == {"$ref": reference}


@FORMATS
@pytest.mark.parametrize("kinds", [{"type": ["string", "null"]}, {"type": ["string", "number"]}, {}], ids=str)
def test_a_choice_of_texts_and_other_values_is_a_choice(tools: ToolFormat, kinds: dict[str, Any]) -> None:
    other = None if kinds.get("type") == ["string", "null"] else 5
    schema = of({"state": {**kinds, "enum": ["open", "", "\U0001f600", other]}})
    for value in ("open", "", "\U0001f600"):
        assert allows(tools, schema, {"state": value})
    assert not allows(tools, schema, {"state": "shut"})
    text = written(tools, [("call", {"state": other})])
    assert takes(format_of(tools, True), Wanted([Tool("call", schema)], "required", many=False), text) is None


@FORMATS
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": ["string", "null"]}, [None, "", "nul", "nullable", "null \n", "a\nb"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, [None, "a"]),
        ({"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]}, [None, "a"]),
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, [None, "2026-01-31"]),
        ({"enum": ["a", 5, None]}, ["a", 5, None]),
        ({"type": ["string", "number", "boolean"]}, ["a", "-", "1.2.3", "Infinity", "truely", -1.5e3, 7, True, False]),
        ({"type": ["string", "integer"]}, ["1.5", "true", 12]),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            ["[a]", "a", [], ["a", "b,"]],
        ),
        ({"oneOf": [{"type": "string"}, POINT]}, ["{x}", "a", {"x": 1}]),
    ],
    ids=str,
)
def test_what_may_be_a_text_may_also_be_what_else_its_schema_allows(
    tools: ToolFormat, schema: dict[str, Any], values: list[Any]
) -> None:
    for value in values:
        if not (tools.arguments == "parameters" and value == "null \n"):  # a null there, as blanks do not count
            assert allows(tools, of({"value": schema}), {"value": value}), value


@FORMATS
@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["c", 1]),
        ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, ["today", "null0"]),
        ({"type": "string", "enum": ["a", None]}, [None]),
        ({"type": ["string", "integer"], "enum": ["a", 5, 6.5]}, [6.5, 6]),
    ],
    ids=str,
)
def test_what_may_be_a_text_is_nothing_that_its_schema_forbids(
    tools: ToolFormat, schema: dict[str, Any], wrong: list[Any]
) -> None:
    for value in wrong:
        assert not allows(tools, of({"value": schema}), {"value": value}), value


@pytest.mark.parametrize(
    ("schema", "pieces"),
    [
        ({"type": "string"}, ['{"value": "', "n", "u", "x", '"', "}"]),
        ({"type": ["string", "null"]}, ['{"value": ', '"nux', '"', "}"]),
        ({"type": ["string", "array"]}, ['{"value": ', '"n', "u", "x", '"', "}"]),
    ],
    ids=str,
)
def test_a_text_streams_from_where_it_can_be_nothing_else(schema: dict[str, Any], pieces: list[str]) -> None:
    tools = next(one for one in TOOL_FORMATS if one.arguments == "parameters")
    reader = AnswerReader(format_of(tools, True), [Tool("call", of({"value": schema}))])
    text = written(tools, [("call", {"value": "nux"})])
    found = [part.text for character in text for part in reader.feed(character) if part.kind == "arguments"]
    assert found == pieces


@FORMATS
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"anyOf": [TEXTS, {"type": "null"}]}, [None, [], ["a,b"], ["a b", "{", '"', "a\nb"]]),
        ({"anyOf": [of({"a": {"type": "string"}}), {"type": "null"}]}, [None, {"a": "x, y"}]),
        ({"type": ["object", "null"], **of({"a": {"type": "string"}})} | {"type": ["object", "null"]}, [{"a": "}"}]),
        ({"type": "object", "additionalProperties": {"type": "string"}}, [{}, {"a": "b", "c d": "", "x:y": "z,"}]),
        ({"type": "object", "additionalProperties": POINT}, [{"a": {"x": 1}, "b": {"x": 2}}]),
        ({"type": "object"}, [{}, {"a": [1, None, {"b": ["c", {}]}], "d": {"e": True}, "f": "g"}]),
        ({}, [None, 1.5, "a", "", [], ["a", [["{"]]], {"a": {"b": "}"}}]),
        ({"type": "array"}, [[], ["a", 1, {"b": None}]]),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 0}, [[]]),
        (of({"filter[a]": {"type": "string"}, "x:y": POINT, "$f": {}, '"': {}}), [
            {"filter[a]": "b", "x:y": {"x": 1}, "$f": 1, '"': "a"}
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_what_holds_texts_is_read_as_it_was_written(
    tools: ToolFormat, schema: dict[str, Any], values: list[Any]
) -> None:
    for value in values:
        assert allows(tools, of({"value": schema}), {"value": value}), value


@GEMMA
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False}, [["a, b", 1]]),
        ({"type": "object", "patternProperties": {"^x": {"type": "string"}}}, [{"x: {": "a\\", "x": '"]'}]),
        ({"allOf": [{"type": "object", "minProperties": 1}, TREE]}, [{"name": "a, b", "children": []}]),
    ],
    ids=str,
)
def test_json_within_an_object_of_gemma_is_read_as_json(
    tools: ToolFormat, schema: dict[str, Any], values: list[Any]
) -> None:
    tool = Tool("call", of({"first": {"type": "string"}, "value": schema, "last": {"type": "string"}}))
    for value in values:
        first, last = gemma({"first": "a", "last": "b"}, tools.quote)[1:-1].split(",")
        text = f"{{{first},value:{json.dumps(value)},{last}}}"
        text = tools.begin + "call" + tools.middle + text + tools.end
        assert takes(format_of(tools, True), Wanted([tool], "required", many=False), text) is None
        found = calls_of(read(format_of(tools, True), text, tools=[tool]))
        assert found == [("call", {"first": "a", "value": value, "last": "b"})]


CAT = of({"kind": {"const": "cat"}, "name": {"type": "string"}})
DOG = of({"kind": {"const": "dog"}, "age": {"type": "integer"}})
NODE = {
    "type": "object",
    "properties": {"value": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "required": ["value"],
}
EITHER = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}
ANIMALS = {"$defs": {"Cat": CAT, "Dog": DOG}}
ANIMAL = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "discriminator": {"propertyName": "kind"}}


@FORMATS
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (of({"v": ANIMAL}, **ANIMALS), [{"v": {"kind": "cat", "name": "a, b"}}], [{"v": {"kind": "cat", "age": 1}}]),
        ({"type": "object", **ANIMAL, **ANIMALS}, [{"kind": "cat", "name": "a"}, {"kind": "dog", "age": 1}], [{}]),
        ({"$ref": "#/definitions/T", "definitions": {"T": CAT}}, [{"kind": "cat", "name": "a"}], [{}]),
        (of({"v": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": NODE}}),
         [{"v": {"value": "a", "next": {"value": "b, c", "next": None}}}], [{"v": {"value": "a", "next": {}}}]),
        (of({"v": {"allOf": [{"$ref": "#/$defs/C"}], "default": "red"}}, **{"$defs": {"C": {"enum": ["red"]}}}),
         [{"v": "red"}], [{"v": "blue"}]),
        (of({"v": {"allOf": [CAT, POINT | {"additionalProperties": True}]}}),
         [{"v": {"kind": "cat", "name": "a, b", "x": 1}}], [{"v": {"kind": "cat", "name": "a"}}]),
        (EITHER, [{"a": "x"}, {"b": "y"}, {"a": "x", "b": "y"}], [{}]),
        (of({"v": EITHER}), [{"v": {"b": "y, z"}}], [{"v": {}}]),
        (of({"v": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}), [{"v": {"a": "b, c"}}], [{"v": {}}]),
        (of({"v": {"items": {"type": "string"}}}), [{"v": ["a, b"]}], [{"v": [None]}]),
        (of({"v": {"pattern": "^a", "maxLength": 2}}), [{"v": "ab"}], [{"v": "ba"}, {"v": "abc"}]),
        (of({"v": of({"a": {"type": "integer"}}, additionalProperties={"type": "string"})}),
         [{"v": {"a": 1}}, {"v": {"a": 1, "b": "c, d", "ab": ""}}], [{"v": {"a": "b"}}, {"v": {"a": 1, "b": 2}}]),
        (of({"v": {"anyOf": [{"const": "a"}, {"const": 1}]}}), [{"v": "a"}, {"v": 1}], [{"v": "b"}, {"v": 2}]),
    ],
    ids=str,
)  # fmt: skip
def test_schemas_of_generators_are_followed_in_the_own_form_of_a_format(
    tools: ToolFormat, schema: dict[str, Any], good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    for arguments in good:
        assert allows(tools, schema, arguments), arguments
    for arguments in bad:
        assert not allows(tools, schema, arguments), arguments


@FORMATS
def test_a_union_of_a_large_recursive_type_has_its_rules_once(tools: ToolFormat) -> None:
    names = [f"kind_{number}" for number in range(20)]
    options = [of({"kind": {"const": name}, "left": {"$ref": "#/$defs/E"}}) for name in names]
    options[0] = of({"kind": {"const": names[0]}})
    optional = {"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}]}
    schema = of(dict.fromkeys(names, optional), **{"$defs": {"E": {"anyOf": options}}})
    value = {"kind": names[2], "left": {"kind": names[1], "left": {"kind": names[0]}}}
    assert allows(tools, schema, dict.fromkeys(names, value))
    if tools.arguments == "gemma":
        text = tool_grammar(format_of(tools, True), Wanted([Tool("call", schema)], "required"))
        assert len(text) < 30_000


@FORMATS
@pytest.mark.parametrize("keyword", ["allOf", "items"])
def test_a_schema_that_is_nested_too_deeply_is_refused(tools: ToolFormat, keyword: str) -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        nested = {keyword: nested if keyword == "items" else [nested]}
    with pytest.raises(RequestError, match=r"deep|recursion limit"):
        matcher(format_of(tools, True), Wanted([Tool("call", of({"value": nested}))], "required"), True)


@GEMMA
def test_a_schema_of_thousands_of_properties_does_not_fill_the_stack(tools: ToolFormat) -> None:
    properties = {f"part_{number}": {"type": "integer"} for number in range(3500)}
    matcher(format_of(tools, True), Wanted([Tool("call", of(properties))], "required"), True)


@FORMATS
@pytest.mark.parametrize(
    "part",
    [
        {"type": {}}, {"enum": True}, {"items": {}, "maxItems": {}}, {"$ref": "#/$defs/none"},
        {"type": "object", "properties": []},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_schema_is_refused(tools: ToolFormat, part: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        matcher(format_of(tools, True), Wanted([Tool("call", of({"value": part}))], "required"), True)
