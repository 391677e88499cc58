"""Schemas of tools with keywords that a grammar cannot follow, in the APIs of chat, responses and messages."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.server.schema import ChatRequest
from engine.server.tools import asked_schema
from engine.server.tools.asked_schema import AskedSchema
from engine.server.tools.calling import Calling
from engine.text.answer_format import AnswerFormat
from tests.engine.server.process import ServerProcess
from tests.engine.server.test_tool_message import HERMES
from tests.engine.server.tool_model import tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["a"]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
        "notes": {"type": "object", "additionalProperties": False, "propertyNames": {"type": "string"}},
    },
    "required": ["tags", "notes"],
    "additionalProperties": False,
}
ONLY_CALL = {"tags": ["a", "a"], "notes": {}}  # that a grammar allows
UNCOMPARED = "s: not compared: the schema is too large, refers elsewhere or cannot be read"
CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "Tag."}]


def chat(strict: bool | None, schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    other, asked = tool("other", {"type": "object", "properties": {}}), tool("tag", schema)
    asked["function"]["strict"] = strict
    choice = {"type": "function", "function": {"name": "tag"}}
    return {"messages": SAID, "tools": [other, asked], "tool_choice": choice}


def responses(strict: bool | None, schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    names = {"type": "function", "name": "tag"}
    asked = names | {"parameters": schema, "strict": strict}
    other = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}}
    return {"input": "Tag.", "tools": [other, asked], "tool_choice": names}


def messages(strict: bool | None, schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    asked = {"name": "tag", "input_schema": schema, "strict": strict}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, asked]
    return {"messages": SAID, "max_tokens": 400, "tools": tools, "tool_choice": {"type": "tool", "name": "tag"}}


ROUTES = pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        (CHAT, chat, "tools[1].function.parameters"),
        ("/v1/responses", responses, "tools[1].parameters"),
        ("/v1/messages", messages, "tools[1].input_schema"),
    ],
)


def arguments(answer: dict[str, Any]) -> Any:
    """Return those of the one call of an answer, whatever its API."""
    if "choices" in answer:
        return json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    return json.loads(answer["output"][0]["arguments"]) if "output" in answer else answer["content"][0]["input"]


@ROUTES
def test_a_keyword_that_no_grammar_follows_refuses_no_request(
    tool_server: ServerProcess, route: str, body: Any, path: str
) -> None:
    answer = tool_server.ask(route, **body(None))
    assert arguments(answer) == ONLY_CALL
    assert "metrics" not in answer or f"{path}.properties.tags.uniqueItems" in answer["metrics"]["ignored"]
    assert tool_server.logged()["not_followed"] == ["tools[1]: uniqueItems"]
    assert tool_server.events(route, **body(None))
    assert tool_server.logged()["not_followed"] == ["tools[1]: uniqueItems"]
    warned = [line["event"] for line in tool_server.lines if "tools[1]: uniqueItems:" in line["event"]]
    assert len(warned) == 1 and "propertyNames" not in warned[0]
    assert ".properties.tags" not in str(tool_server.lines)  # names in a schema are the client's


@ROUTES
def test_a_strict_tool_is_followed_exactly_or_refused(
    tool_server: ServerProcess, route: str, body: Any, path: str
) -> None:
    refused = tool_server.post(route, **body(True))
    assert refused.status_code == 400
    assert f'{path}: Unimplemented keys: ["uniqueItems"]' in refused.text.replace("\\", "")
    exact = json.loads(json.dumps(SCHEMA).replace(', "uniqueItems": true', ""))
    assert arguments(tool_server.ask(route, **body(True, exact))) == ONLY_CALL
    assert "not_followed" not in tool_server.logged()


def test_the_schema_of_an_answer_is_followed_exactly_where_it_is_strict(tool_server: ServerProcess) -> None:
    def asked(strict: bool | None) -> dict[str, Any]:
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}
        return {"messages": SAID, "response_format": format_}

    path = "response_format.json_schema.schema"
    assert tool_server.post(CHAT, **asked(True)).json()["error"]["param"] == path
    answer = tool_server.ask(CHAT, **asked(None))
    assert json.loads(answer["choices"][0]["message"]["content"]) == ONLY_CALL
    assert answer["metrics"]["ignored"] == [f"{path}.properties.tags.uniqueItems"]
    assert tool_server.logged()["not_followed"] == [f"{path}: uniqueItems"]


def test_an_answer_that_follows_the_whole_schema_is_not_named(tool_server: ServerProcess) -> None:
    schema = {**SCHEMA, "properties": SCHEMA["properties"] | {"tags": {"const": ["a", "b"], "uniqueItems": True}}}
    answer = tool_server.ask(CHAT, **chat(False, schema))
    assert arguments(answer)["tags"] == ["a", "b"] and len(answer["metrics"]["ignored"]) == 1
    assert "not_followed" not in tool_server.logged()


@pytest.mark.parametrize(
    ("schema", "value", "keywords"),
    [
        ({"type": "array", "uniqueItems": True}, [1, 1], ["uniqueItems"]),
        ({"type": "array", "uniqueItems": True}, [1, 2], []),
        ({"not": {"type": "string"}}, "x", ["not"]),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "x", ["minLength"]),
        ({"type": "string", "pattern": "^(?=.*b)a"}, "a", ["pattern"]),
        ({"type": "string", "pattern": "^(?=.*b)a"}, "ab", []),
        ({"items": [{"not": {}}]}, [1], ["not"]),
        ({"oneOf": [{"type": "string"}, {"minLength": 1}]}, "x", ["oneOf"]),
        ({"properties": {"secret": {"not": {}}, "other": {"uniqueItems": True}}}, {"secret": 1}, ["not"]),
        ({"properties": {"secret": False}, "not": {"type": "null"}}, {"secret": 1}, ["falseSchema"]),
        ({"dependentRequired": {"a": ["secret"]}}, {"a": 1}, ["required"]),
        ({"properties": {"a": {"minimum": 2}}}, {"a": 1}, []),  # a grammar follows it
    ],
)
def test_a_finished_value_is_compared_with_the_whole_schema(schema: Any, value: Any, keywords: list[str]) -> None:
    if isinstance(schema.get("items"), list):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert AskedSchema.of("s", schema, None).differences(value) == [f"s: {keyword}" for keyword in keywords]


@pytest.mark.parametrize("value", ["1e999", "[" * 5000 + "]" * 5000, "[" * 5000], ids=len)
def test_a_value_that_cannot_be_read_is_not_compared(value: str) -> None:
    text = f'<tool_call>\n{{"name": "weather", "arguments": {{"a": {value}}}}}\n</tool_call>'
    parameters = {"type": "object", "properties": {"a": {"uniqueItems": True}}, "not": {}}
    asked = ChatRequest.model_validate({"model": "m", "messages": SAID, "tools": [tool(parameters=parameters)]})
    calling = Calling.of(asked, AnswerFormat(HERMES, None, {}))
    assert calling.left_out and calling.differences(text, thinking=False) == []


def test_an_error_of_the_comparison_is_none_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(schema: str) -> None:
        raise OverflowError(schema)

    monkeypatch.setattr(asked_schema, "_remembered", fails)
    assert AskedSchema.of("s", {"not": {}}, None).differences(1) == [UNCOMPARED]


def test_a_schema_that_refers_elsewhere_or_is_hostile_costs_little() -> None:
    away = AskedSchema.of("s", {"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}, "not": {}}, None)
    assert away.differences({}) == [UNCOMPARED]
    slow = AskedSchema.of("s", {"type": "string", "pattern": "^(?=(x+x+)+y)(x+x+)+y$"}, None)
    assert slow.differences("x" * 5000) == ["s: pattern"]
    many = AskedSchema.of("s", {"properties": {f"p{number}": {"not": {}} for number in range(99)}}, None)
    assert len(many.left_out) == 33 and many.left_out[-1] == "s: 67 more keywords"
    assert many.noted == ["s: not"] and many.differences({f"p{number}": 1 for number in range(99)}) == ["s: not"]


def chained(links: int, link: Any, last: dict[str, Any]) -> AskedSchema:
    names = [f"#/$defs/a{number}" for number in range(links + 1)]
    links_ = {f"a{number}": link({"$ref": names[number + 1]}) for number in range(links)}
    return AskedSchema.of("s", {"$defs": links_ | {f"a{links}": last}, "$ref": names[0], "not": {"const": 9}}, None)


def nested(depth: int, around: Any) -> Any:
    value: Any = {"b": 1}
    for _ in range(depth):
        value = around(value)
    return value


@pytest.mark.parametrize(
    ("link", "value"),
    [
        (lambda inner: {"anyOf": [inner, inner]}, "x"),
        (lambda inner: {"oneOf": [inner, inner]}, "x"),
        (lambda inner: {"allOf": [{"not": inner}, {"not": {"not": inner}}]}, "x"),
        (lambda inner: {"if": inner, "then": inner, "else": inner}, "x"),
        (lambda inner: {"dependentSchemas": {"b": inner, "c": inner}}, {"b": 1, "c": 2}),
        (lambda inner: {"allOf": [inner], "unevaluatedProperties": False}, {"b": 1}),
        (lambda inner: {"properties": {"a": {"anyOf": [inner, inner]}}}, nested(24, lambda value: {"a": value})),
        (lambda inner: {"contains": inner, "items": inner}, nested(24, lambda value: [value])),
    ],
)  # fmt: skip
def test_schemas_that_double_at_each_level_are_not_compared(link: Any, value: Any) -> None:
    asked = chained(24, link, {"type": "string", "not": {"minLength": 1}})
    started_s = time.perf_counter()
    assert asked.differences(value) == [UNCOMPARED]
    assert time.perf_counter() - started_s < 2


def test_what_the_library_expands_before_it_sees_a_value_is_counted() -> None:
    links = {f"a{number}": {"anyOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(24)}
    other = {"allOf": [{"$ref": "#/$defs/a0"}], "unevaluatedProperties": False}
    whole = {"$defs": links | {"a24": {"type": "object"}}, "properties": {"other": other}}
    started_s = time.perf_counter()
    assert AskedSchema.of("s", whole, None).differences({"b": 1}) == [UNCOMPARED]
    assert time.perf_counter() - started_s < 2


def test_a_schema_that_refers_to_itself_is_compared_as_deep_as_the_value() -> None:
    tree = {"properties": {"next": {"$ref": "#"}, "tags": {"type": "array", "uniqueItems": True}}}
    assert AskedSchema.of("s", tree, None).differences({"next": {"next": {"tags": [1, 2]}}}) == []
    assert AskedSchema.of("s", tree, None).differences({"next": {"next": {"tags": [1, 1]}}})
    forever = AskedSchema.of("s", {"allOf": [{"$ref": "#"}], "not": {}}, None)
    assert forever.differences({}) == [UNCOMPARED]


def test_references_that_cannot_be_counted_are_not_followed() -> None:
    based = {"a": {"$id": "http://x/", "$ref": "#/$defs/b"}, "b": {"not": {}}}
    for schema in ({"$defs": based}, {"$ref": "#name", "not": {}}, {"$ref": "#/$defs/none", "not": {}}):
        assert AskedSchema.of("s", {"not": {}} | schema, None).differences({}) == [UNCOMPARED]


def test_a_large_value_is_not_walked_again_for_each_schema_that_applies_to_it() -> None:
    open_: dict[str, Any] = {"unevaluatedItems": {"not": {}}}
    asked = AskedSchema.of("s", {"allOf": [open_] * 4000}, None)
    started_s = time.perf_counter()
    assert asked.differences([1] * 30_000) == [UNCOMPARED]
    assert time.perf_counter() - started_s < 2


def test_the_keywords_that_a_large_value_does_not_follow_are_not_named_one_by_one() -> None:
    many = AskedSchema.of("s", {"allOf": [{"not": {"minimum": number}} for number in range(2000)]}, None)
    assert many.differences(["x" * 20] * 3000) == ["s: not followed"]
    names = [f"a{number}" for number in range(2000)]
    assert AskedSchema.of("s", {"items": {"required": names}, "not": {}}, None).differences([{}] * 9) == [UNCOMPARED]


def test_a_clients_names_cannot_move_the_logs_cursor() -> None:
    (name,) = AskedSchema.of("s", {"properties": {"\x1b[2J" + "x" * 500: {"not": {}}}}, None).left_out
    assert name.isprintable() and len(name) < 300
