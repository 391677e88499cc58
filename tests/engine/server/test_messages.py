"""Anthropic's /v1/messages, with plain HTTP, and with the official client where it is installed."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse

from engine.answer import Answer
from engine.core.params import SamplingParams
from engine.server.messages.billing import BILLING_LINE
from engine.server.messages.render import MessagesRenderer
from engine.server.messages.schema import MessagesRequest
from engine.server.messages.translate import chat_fields
from engine.server.tools.calling import Calling
from engine.server.translate import ChoiceRequest, chat_request
from engine.text.answer_format import AnswerFormat
from engine.text.stream import TextStream
from engine.text.template import render_template
from engine.wire.messages import Ready
from tests.conftest import tiny_tokenizer
from tests.engine.server.process import KEY, ServerProcess
from tests.engine.server.test_tool_message import HERMES
from tests.engine.server.tool_model import WEATHER
from tests.engine.test_answer import round_of

jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

TOOLS = [{"name": "weather", "description": "Tell it.", "input_schema": WEATHER}]
CALL = {"type": "tool", "name": "weather"}


def asked(**more: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "Weather?"}], "seed": 2}
    return {**usual, **more}


def post(server: ServerProcess, body: dict[str, Any], path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=headers, timeout=120)


def counted(server: ServerProcess, **body: Any) -> int:
    tokens: int = server.ask("/v1/messages/count_tokens", **body)["input_tokens"]
    return tokens


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


@pytest.mark.parametrize(
    ("more", "kinds", "reason"),
    [
        ({"tools": TOOLS, "tool_choice": CALL}, ["tool_use"], "tool_use"),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, ["tool_use"], "tool_use"),
        ({"max_tokens": 9, "system": "Be brief."}, ["text"], "max_tokens"),
        ({"max_tokens": 9, "thinking": {"type": "adaptive"}}, ["thinking"], "max_tokens"),
    ],
)
def test_the_events_of_a_stream_add_up_to_the_whole_message(
    tool_server: ServerProcess, more: dict[str, Any], kinds: list[str], reason: str
) -> None:
    whole, found = post(tool_server, asked(**more)).json(), events(tool_server, asked(**more))
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", reason)
    assert [block["type"] for block in whole["content"]] == kinds
    for block in whole["content"]:
        if block["type"] == "tool_use":
            jsonschema.validate(block["input"], WEATHER)
    assert added_up(found) == [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    assert found[0]["type"] == "message_start" and found[0]["message"]["content"] == []
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == reason
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert reason != "max_tokens" or whole["usage"]["output_tokens"] == 9


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
    assert max(usage["input_tokens"] for usage in (first, again)) <= 16
    assert read_tokens(first) == read_tokens(again)


def test_a_stream_of_a_prompt_of_whole_blocks_ends_with_a_count_of_its_tokens(tool_server: ServerProcess) -> None:
    short = {"messages": [{"role": "user", "content": "y"}]}
    more = {"messages": [{"role": "user", "content": "y" * (1 + -counted(tool_server, **short) % 16 + 32)}]}
    for _ in range(2):  # nothing of it is in the cache, and all that can be
        begun, *_, last, _ = events(tool_server, asked(max_tokens=1, **more))
        assert (begun["message"]["usage"]["input_tokens"] % 16, last["usage"]["input_tokens"]) == (0, 16)
        assert read_tokens(last["usage"]) == read_tokens(begun["message"]["usage"])


def test_a_prompt_that_does_not_fit_is_counted_and_refused_in_the_words_that_anthropics_clients_read(
    tool_server: ServerProcess,
) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    assert counted(tool_server, messages=long) > 5000
    answer = post(tool_server, asked(messages=long))
    tokens, most = re.findall(r"prompt is too long: (\d+) tokens > (\d+) maximum", answer.text)[0]
    assert int(tokens) > int(most) == 4096


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DOCUMENT = {"type": "document", "title": "Plan", "source": {"type": "url", "url": "http://a/b.pdf"}}
FOUND = {
    "type": "search_result", "title": "Weather today", "source": "http://a",
    "content": [{"type": "text", "text": "It is clear."}], "citations": {"enabled": True},
}  # fmt: skip
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


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
    tools = [SEARCH | CACHED, {"type": "mcp_toolset", "mcp_server_name": "a"}, TOOLS[0] | offered | CACHED]
    usual = asked(messages=said, tools=tools, system=[{"type": "text", "text": "Go."} | CACHED], max_tokens=1)
    plain = {"mcp_servers": [], "betas": ["a-2025-01-01"], "speed": "fast", "diagnostics": {"previous": None}}
    return usual | plain | CACHED | more


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
    assert post(tool_server, agents_request(tools=[SEARCH])).status_code == 200


def test_the_prompt_has_a_text_where_a_result_is_no_text() -> None:
    fields = chat_fields(MessagesRequest.model_validate(agents_request()))
    *_, asks, calls, result = fields["messages"]
    assert (asks["content"], calls["content"], [call["id"] for call in calls["tool_calls"]]) == ("Weather?", "", ["a"])
    assert result["content"].splitlines() == [
        "[an image was here: this model reads text alone]",
        "[a document 'Plan' was here: this model reads text alone]",
        "Weather today",
        "http://a",
        "It is clear.",
        "The tool weather can be called.",
    ]
    assert [one["function"]["name"] for one in fields["tools"]] == ["weather"]


QWEN3 = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
"""The end of a template that reasons unless it is told not to."""


@pytest.mark.parametrize(
    ("thinking", "thinks"), [(None, False), ("disabled", False), ("enabled", True), ("adaptive", True)]
)
def test_there_is_no_reasoning_unless_it_is_asked_for(thinking: str | None, thinks: bool) -> None:
    body = MessagesRequest.model_validate(asked(thinking=None if thinking is None else {"type": thinking}))
    chat = chat_request(chat_fields(body))
    said = [message.plain() for message in chat.messages]
    text = render_template(QWEN3, said, None, True, False, chat.rendering.variables)
    assert text == ("" if thinks else "<think></think>")


def test_tokens_are_counted_as_an_answers_prompt_has_them(tool_server: ServerProcess) -> None:
    body = agents_request()
    sent = {name: value for name, value in body.items() if name not in ("max_tokens", "seed")}
    tokens = counted(tool_server, **sent)
    assert tokens == read_tokens(post(tool_server, body).json()["usage"])
    shorter = counted(tool_server, **sent | {"messages": body["messages"][:2]})
    assert tokens - shorter > 150, "a byte is a token"


def test_a_stop_sequence_is_named(tool_server: ServerProcess) -> None:
    text = post(tool_server, asked(max_tokens=40)).json()["content"][0]["text"]
    body = post(tool_server, asked(max_tokens=40, stop_sequences=["\0", text[4]])).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", text[4])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice: needs tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools[0]"),
        ({"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"container": "x"}, "container"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thread": {"type": "create"}}, "thread"),
    ],
)
def test_what_is_wrong_is_refused_in_anthropics_form(tool_server: ServerProcess, more: Any, named: str) -> None:
    answer = post(tool_server, asked(**more))
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"].startswith(named)
    # which lets the client's tool runner go on without a thread
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error.get("details") == (details if named == "thread" else None)


def told(arguments: str, *stops: str) -> dict[str, Any]:
    """The message of an answer that called a tool, and ended with its end token."""
    calling = Calling.of(
        chat_request(chat_fields(MessagesRequest(**asked(tools=TOOLS)))), AnswerFormat(HERMES, None, {})
    )
    renderer = MessagesRenderer("tiny", [ChoiceRequest([1], SamplingParams())], calling)
    answer = Answer(TextStream(tiny_tokenizer(), stops), 1, 0.0, Ready(eos_tokens=(0,)), SamplingParams())
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    answer.add(round_of(f"{text}<|end|>", "eos"))
    message: dict[str, Any] = json.loads(JSONResponse(renderer.whole([answer.result()]).model_dump()).body)
    return message


def test_the_end_of_a_turn_as_a_stop_sequence_leaves_a_call_finished() -> None:
    message = told("{}", "<|end|>")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("value", ["1e999", "[" * 900 + "]" * 900, "[" * 5000], ids=len)
def test_a_call_whose_arguments_cannot_be_read_has_none(value: str) -> None:
    (block,) = told(f'{{"days": {value}}}')["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {})


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
    called = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    more = {"messages": [*usual["messages"], *called], "max_tokens": 5}
    assert client.messages.create(**usual | more).stop_reason


LINE = f"{BILLING_LINE}: cc_version=1.0.0.abc; cc_entrypoint=cli;"
SYSTEM = "Be brief."


def block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def said(system: Any) -> list[dict[str, Any]]:
    """The chat messages of a request with that system text."""
    body = asked(messages=[{"role": "user", "content": "Hi"}]) | ({} if system is None else {"system": system})
    messages: list[dict[str, Any]] = chat_fields(MessagesRequest.model_validate(body))["messages"]
    return messages


@pytest.mark.parametrize(
    ("system", "without"),
    [
        ([block(LINE), block(SYSTEM), block("Now.")], f"{SYSTEM}\nNow."),
        (f"{LINE}\n{SYSTEM}", SYSTEM),
        ([block(f"{LINE}\n\n{SYSTEM}")], SYSTEM),
        ([block(LINE)], None),
        (LINE, None),
    ],
)
def test_the_line_that_claude_code_changes_is_no_part_of_the_prompt(system: Any, without: str | None) -> None:
    assert said(system) == said(without)


@pytest.mark.parametrize("system", [[block(SYSTEM), block(LINE)], f"{SYSTEM}\n{LINE}", [block(f" {LINE}")]])
def test_the_same_words_elsewhere_are_text(system: Any) -> None:
    assert LINE in said(system)[0]["content"]
