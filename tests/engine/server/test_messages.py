"""Anthropic's /v1/messages, with plain HTTP, and with the official client where it is installed."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

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
    """Of a stream; each has its type as its name."""
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
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"container": "x"}, "container"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages: prompt is too long: 50"),
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
