"""Schemas as their generators write them, in every tool format: the grammar takes what they allow and nothing else, and
the reader gives back what was written.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.answer_format import ToolFormat
from engine.text.argument_schema import ArgumentSchema
from engine.text.tool_grammar import Tool, Wanted

pytest.importorskip("llguidance", reason="pip install 'talon-decoding[grammar]'")
from tests.engine.text.test_tool_formats import FORMATS, calls_of, format_of, read, takes, written  # noqa: E402

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
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
