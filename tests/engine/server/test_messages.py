"""Anthropic's /v1/messages, with plain HTTP, and with the official client where it is installed."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from engine.server.messages import schema as messages_schema
from engine.server.messages.translate import chat_fields
from tests.engine.server.process import KEY, ServerProcess
from tests.engine.server.tool_model import WEATHER

jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

TOOLS = [{"name": "weather", "description": "Tell it.", "input_schema": WEATHER}]
CALL = {"type": "tool", "name": "weather"}


def asked(**more: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Weather?"}], "seed": 2}
    return {**usual, **more}


def post(server: ServerProcess, body: dict[str, Any], path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=120)


def events(server: ServerProcess, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream; each has its type as its name."""
    text = post(server, body | {"stream": True}).text
    found = []
    for event in filter(None, text.split("\n\n")):
        if not event.startswith(":"):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def read_tokens(usage: dict[str, int]) -> int:
    """All tokens of the prompt, wherever they came from."""
    return sum(count for name, count in usage.items() if name != "output_tokens")


def added_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream's events."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == len(texts)
            blocks.append(event["content_block"])
            texts.append("")
        if event["type"] == "content_block_delta":
            (grown,) = (value for key, value in event["delta"].items() if key != "type")
            texts[event["index"]] += grown
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        else:
            block[block["type"]] = text
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def test_a_message_has_its_text_its_reason_and_its_tokens(tool_server: ServerProcess) -> None:
    body = post(tool_server, asked(max_tokens=6, system="Be brief.")).json()
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert body["usage"]["output_tokens"] == 6 and [block["type"] for block in body["content"]] == ["text"]


@pytest.mark.parametrize("choice", [CALL, {"type": "any", "disable_parallel_tool_use": True}])
def test_a_tool_is_used_as_its_schema_wants(tool_server: ServerProcess, choice: Any) -> None:
    body = post(tool_server, asked(tools=TOOLS, tool_choice=choice)).json()
    (block,) = body["content"]
    assert (block["type"], block["name"], body["stop_reason"]) == ("tool_use", "weather", "tool_use")
    jsonschema.validate(block["input"], WEATHER)


@pytest.mark.parametrize(
    "more",
    [{"tools": TOOLS, "tool_choice": CALL}, {"max_tokens": 9}, {"max_tokens": 9, "thinking": {"type": "adaptive"}}],
)
def test_the_events_of_a_stream_add_up_to_the_whole_message(tool_server: ServerProcess, more: dict[str, Any]) -> None:
    whole, found = post(tool_server, asked(**more)).json(), events(tool_server, asked(**more))
    assert added_up(found) == [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    assert found[0]["type"] == "message_start" and found[0]["message"]["content"] == []
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_conversation_goes_on_with_uses_and_results(tool_server: ServerProcess) -> None:
    used = post(tool_server, asked(tools=TOOLS, tool_choice=CALL)).json()["content"]
    result = {"type": "tool_result", "tool_use_id": used[0]["id"], "content": [{"type": "text", "text": "clear"}]}
    said = [
        *asked()["messages"],
        {"role": "assistant", "content": used},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    more = {"system": [{"type": "text", "text": "Be brief."}], "metadata": {"user_id": "a"}, "max_tokens": 5}
    assert post(tool_server, asked(tools=TOOLS, messages=said, **more)).status_code == 200


def test_tokens_are_counted_as_an_answers_prompt_has_them(tool_server: ServerProcess) -> None:
    body = asked(tools=TOOLS, max_tokens=1)
    counted = {name: body[name] for name in ("model", "messages", "tools")}
    tokens = post(tool_server, counted, "/v1/messages/count_tokens").json()["input_tokens"]
    assert tokens == read_tokens(post(tool_server, body).json()["usage"]) > 100


def test_more_tokens_than_fit_are_counted_too(tool_server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
    assert post(tool_server, body, "/v1/messages/count_tokens").json()["input_tokens"] > 5000


def test_a_count_that_is_refused_names_what_the_client_sent(tool_server: ServerProcess) -> None:
    half = {"name": "weather", "input_schema": {"type": "object", "description": "\ud800"}}
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [half]})
    told = {"Content-Type": "application/json"}
    answer = httpx.post(f"{tool_server.url}/v1/messages/count_tokens", content=body, headers=told, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("messages: holds half")


def test_what_the_prefix_cache_had_is_told_apart_from_what_was_read(tool_server: ServerProcess) -> None:
    body = asked(system="Stand apart. " * 20, max_tokens=20)
    first = post(tool_server, body).json()["usage"]
    *_, last, _ = events(tool_server, body)
    again = last["usage"]
    assert first["cache_creation_input_tokens"] % 16 == 0 < first["cache_creation_input_tokens"]
    assert again["cache_read_input_tokens"] > 200 > first["cache_read_input_tokens"]
    assert max(usage["input_tokens"] for usage in (first, again)) < 16
    assert read_tokens(first) == read_tokens(again)


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_anthropics_clients_read(
    tool_server: ServerProcess,
) -> None:
    answer = post(tool_server, asked(messages=[{"role": "user", "content": "x" * 5000}]))
    tokens, most = re.findall(r"prompt is too long: (\d+) tokens > (\d+) maximum", answer.text)[0]
    assert int(tokens) > int(most) == 4096


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "title": "Plan", "source": {"type": "url", "url": "http://a/b.pdf"}}
FOUND = {
    "type": "search_result", "title": "Weather today", "source": "http://a",
    "content": [{"type": "text", "text": "It is clear."}], "citations": {"enabled": True},
}  # fmt: skip
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def agents_request(**more: Any) -> dict[str, Any]:
    """What a coding agent sends in a later turn: fields of Anthropic's that this server has nothing for, and a history
    with results that are no text.
    """
    offered = {"defer_loading": True, "input_examples": [{"city": "Rome", "days": 1}], "allowed_callers": ["direct"]}
    parts: list[dict[str, Any]] = [IMAGE, DOCUMENT, FOUND, {"type": "tool_reference", "tool_name": "weather"}]
    results = [{"type": "tool_result", "tool_use_id": "a", "content": [part | CACHED for part in parts]} | CACHED]
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome", "days": 1}}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    searched = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"} | CACHED]},
        {"role": "assistant", "content": [hidden | CACHED, search, searched, call | CACHED]},
        {"role": "user", "content": results},
    ]
    server_tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5} | CACHED]
    server_tools += [{"type": "mcp_toolset", "mcp_server_name": "a"}]
    usual = asked(
        messages=said,
        tools=[*server_tools, TOOLS[0] | offered | CACHED],
        system=[{"type": "text", "text": "Go."} | CACHED],
    )
    plain = {
        "mcp_servers": [],
        "betas": ["a-2025-01-01"],
        "speed": "fast",
        "diagnostics": {"previous_message_id": None},
    }
    return usual | plain | CACHED | {"max_tokens": 1} | more


IGNORED = {
    "allowed_callers", "betas", "cache_control", "citations", "defer_loading", "diagnostics", "document", "image",
    "input_examples", "mcp_toolset", "server_tool_use", "speed", "web_search_20250305", "web_search_tool_result",
}  # fmt: skip


def test_fields_that_this_server_has_nothing_for_are_named_and_refuse_nothing(tool_server: ServerProcess) -> None:
    answer = post(tool_server, agents_request())
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["metrics"]["ignored"]) == IGNORED
    begun = events(tool_server, agents_request())[0]
    assert set(begun["message"]["metrics"]["ignored"]) == IGNORED
    warned = [line["event"] for line in tool_server.lines if line.get("level") == "warning"]
    assert all(sum(f"field: {name}:" in event for event in warned) == 1 for name in IGNORED)


def test_the_prompt_has_a_text_where_a_result_is_no_text(tool_server: ServerProcess) -> None:
    body = messages_schema.MessagesRequest.model_validate(agents_request())
    *_, asks, calls, result = chat_fields(body)["messages"]
    assert (asks["content"], calls["content"], [call["id"] for call in calls["tool_calls"]]) == ("Weather?", "", ["a"])
    assert result["content"].splitlines() == [
        "[an image was here: this model reads text alone]",
        "[a document 'Plan' was here: this model reads text alone]",
        "Weather today",
        "http://a",
        "It is clear.",
        "The tool weather can be called.",
    ]
    assert [one["function"]["name"] for one in chat_fields(body)["tools"]] == ["weather"]


def test_all_of_it_is_counted(tool_server: ServerProcess) -> None:
    body = agents_request()
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "seed")}
    tokens = post(tool_server, counted, "/v1/messages/count_tokens").json()["input_tokens"]
    usage = post(tool_server, body).json()["usage"]
    assert tokens == sum(usage[name] for name in usage if "input" in name)
    shorter = post(tool_server, counted | {"messages": body["messages"][:2]}, "/v1/messages/count_tokens").json()
    assert tokens - shorter["input_tokens"] > 150, "a byte is a token"


def test_a_choice_of_a_tool_that_is_left_out_is_refused(tool_server: ServerProcess) -> None:
    alone = {"tools": agents_request()["tools"][:1]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        assert post(tool_server, agents_request(**alone, tool_choice=choice)).status_code == 400
    assert post(tool_server, agents_request(**alone)).status_code == 200


def test_a_stop_sequence_is_named(tool_server: ServerProcess) -> None:
    text = post(tool_server, asked(max_tokens=40)).json()["content"][0]["text"]
    body = post(tool_server, asked(max_tokens=40, stop_sequences=["\0", text[4]])).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", text[4])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools[0]"),
        ({"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"container": "x"}, "container"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages: prompt is too long: 50"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_what_is_wrong_is_refused_in_anthropics_form(tool_server: ServerProcess, more: Any, named: str) -> None:
    answer = post(tool_server, asked(**more))
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith(named)


def test_a_thread_is_refused_in_the_way_that_lets_the_clients_tool_runner_go_on_without(
    tool_server: ServerProcess,
) -> None:
    answer = post(tool_server, asked(thread={"type": "create"}))
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (answer.status_code, answer.json()["error"]["details"]) == (400, details)
    assert "details" not in post(tool_server, asked(container="x")).json()["error"]


def test_a_key_may_come_in_anthropics_header(one_place: ServerProcess) -> None:
    assert post(one_place, asked(max_tokens=1), **{"x-api-key": KEY}).status_code == 200
    refused = post(one_place, asked(max_tokens=1), **{"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_the_official_client_runs_a_loop_of_tools(tool_server: ServerProcess) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0)
    usual = {name: value for name, value in asked(tools=TOOLS).items() if name != "seed"}
    with client.messages.stream(**usual, tool_choice=CALL) as stream:
        message = stream.get_final_message()
    (block,) = message.content
    jsonschema.validate(block.input, WEATHER)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "clear"}
    said = [
        *usual["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**usual | {"messages": said, "max_tokens": 5}).stop_reason
