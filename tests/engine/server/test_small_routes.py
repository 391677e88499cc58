"""What clients ask of a server beside answers: its models, the tokens of a prompt, and what an answer's usage says of
the prefix cache.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.engine.server.process import ServerProcess
from tests.engine.server.tool_model import tool

HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]


def test_texts_of_any_length_are_tokenized_for_the_served_model_alone(server: ServerProcess) -> None:
    long = server.ask("/tokenize", prompt="ab" * 5000)
    assert long["count"] == len(long["tokens"]) == 10_000 > long["max_model_len"]
    assert server.post("/tokenize", model="other", prompt="ab").status_code == 404


def test_tools_are_part_of_a_prompts_tokens(tool_server: ServerProcess) -> None:
    tokens = tool_server.ask("/tokenize", messages=HI, tools=[tool()])
    answer = tool_server.ask("/v1/chat/completions", messages=HI, tools=[tool()], max_tokens=1)
    assert tokens["count"] == answer["usage"]["prompt_tokens"] > 100


def test_tools_without_messages_or_a_template_that_takes_them_are_refused(
    server: ServerProcess, tool_server: ServerProcess
) -> None:
    plain = server.post("/tokenize", messages=HI, tools=[tool()])
    assert (plain.status_code, plain.json()["error"]["param"]) == (400, "tools")
    text = tool_server.post("/tokenize", prompt="Hi", tools=[tool()])
    assert (text.status_code, text.json()["error"]["message"]) == (400, "tools: need messages")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_the_models_tell_the_context_under_every_name(tool_server: ServerProcess, path: str) -> None:
    (model,) = httpx.get(tool_server.url + path, timeout=60).json()["data"]
    assert [model[name] for name in ("max_model_len", "context_length", "max_input_tokens")] == [4096] * 3


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert found <= usage["prompt_tokens"]
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_tokens_that_the_prefix_cache_had_are_told_streamed_or_not(server: ServerProcess, path: str) -> None:
    text = f"Said of {path}: " + "again and " * 12
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    body = {"max_tokens": 20, "ignore_eos": True, **prompt}
    assert cached(server.ask(path, **body)) < 32
    assert cached(server.ask(path, **body)) > 100
    assert cached(server.events(path, **body, stream_options={"include_usage": True})[-1]) > 100


def test_a_prompt_with_several_choices_counts_once_and_each_of_a_batch_counts(server: ServerProcess) -> None:
    texts = [letter * 100 for letter in "xy"]
    for text in texts:
        server.ask("/v1/completions", prompt=text)
    alone = [cached(server.ask("/v1/completions", prompt=text, n=n)) for text, n in zip(texts, (1, 3), strict=True)]
    assert sum(alone) == cached(server.ask("/v1/completions", prompt=texts)) > 100


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ],
)
def test_a_request_without_a_model_is_for_the_one_that_is_served(
    tool_server: ServerProcess, path: str, asked: dict[str, Any]
) -> None:
    answer = httpx.post(tool_server.url + path, json=asked, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
