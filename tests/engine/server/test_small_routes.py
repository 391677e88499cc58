"""What clients ask of a server beside answers: its models, its routes, the tokens of a prompt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.engine.server.process import ServerProcess
from tests.engine.server.test_openapi import ROUTES
from tests.engine.server.tool_model import tool

HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]


def test_tools_are_part_of_a_prompts_tokens(tool_server: ServerProcess) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": [tool()]}
    tokens = httpx.post(f"{tool_server.url}/tokenize", json=body, timeout=60).json()
    answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body | {"max_tokens": 1}, timeout=60).json()
    assert tokens["count"] == answer["usage"]["prompt_tokens"] > 100


def test_tools_without_messages_or_a_template_that_takes_them_are_refused(
    server: ServerProcess, tool_server: ServerProcess
) -> None:
    plain = httpx.post(f"{server.url}/tokenize", json={"messages": HI, "tools": [tool()]}, timeout=60)
    assert (plain.status_code, plain.json()["error"]["param"]) == (400, "tools")
    text = httpx.post(f"{tool_server.url}/tokenize", json={"prompt": "Hi", "tools": [tool()]}, timeout=60)
    assert (text.status_code, text.json()["error"]["message"]) == (400, "tools: need messages")


def test_a_wrong_path_is_told_every_route(server: ServerProcess) -> None:
    error = httpx.get(f"{server.url}/v1/nothing", timeout=60).json()["error"]
    named = set(error["message"].partition("there are ")[2].split(", "))
    assert named == {path for _, path in ROUTES}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_the_models_tell_the_context_under_every_name(tool_server: ServerProcess, path: str) -> None:
    (model,) = httpx.get(tool_server.url + path, timeout=60).json()["data"]
    assert [model[name] for name in ("max_model_len", "context_length", "max_input_tokens")] == [4096] * 3


def test_options_of_a_stream_do_nothing_to_a_whole_answer(server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 2, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["metrics"]["ignored"] == ["stream_options"] and answer["choices"][0]["message"]


def test_a_stream_of_a_response_that_does_not_fit_says_so_in_its_last_event(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "x" * 2000, "stream": True}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data")]
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1]
    error = events[1]["response"]["error"]
    assert error["code"] == "context_length_exceeded" and "maximum context length is 512 tokens" in error["message"]
    assert error["message"].startswith("input: ")
    whole = httpx.post(f"{server.url}/v1/responses", json=body | {"stream": False}, timeout=60)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
