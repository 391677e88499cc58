"""How many of a prompt's tokens the prefix cache had, in OpenAI's answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.engine.server.process import ServerProcess

ROUTES = ["/v1/chat/completions", "/v1/completions"]


def usage_of(server: ServerProcess, path: str, text: str, **more: Any) -> dict[str, Any]:
    """The usage of an answer, or that of the last chunk of a stream."""
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    body = {"model": "tiny", "max_tokens": 20, "ignore_eos": True, **prompt, **more}
    answer = httpx.post(server.url + path, json=body, timeout=60)
    if "stream" not in more:
        found: dict[str, Any] = answer.json()["usage"]
        return found
    *_, last, _ = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return dict(json.loads(last.removeprefix("data: "))["usage"])


@pytest.mark.parametrize("path", ROUTES)
def test_tokens_that_the_prefix_cache_had_are_told_streamed_or_not(server: ServerProcess, path: str) -> None:
    text = f"Said of {path}: " + "again and " * 12
    first = usage_of(server, path, text)
    again = [
        usage_of(server, path, text),
        usage_of(server, path, text, stream=True, stream_options={"include_usage": True}),
    ]
    assert first["prompt_tokens_details"]["cached_tokens"] < 32
    for usage in again:
        assert 100 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_a_prompt_with_several_choices_counts_once(server: ServerProcess) -> None:
    text = "Count me once: " + "and again " * 12
    usage_of(server, "/v1/completions", text)
    usage = usage_of(server, "/v1/completions", text, n=3)
    assert 100 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def test_a_batch_counts_what_was_found_of_each_prompt(server: ServerProcess) -> None:
    texts = [letter * 100 for letter in "xy"]
    for text in texts:
        usage_of(server, "/v1/completions", text)
    alone = [usage_of(server, "/v1/completions", text) for text in texts]
    both = usage_of(server, "/v1/completions", "", prompt=texts)
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (*alone, both)]
    assert found[0] + found[1] == found[2] > 100


def test_chunks_before_the_end_of_a_stream_do_not_speak_of_the_cache(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4, "stream": True, "stream_options": options}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    *chunks, last, _ = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    details = [json.loads(chunk)["usage"].get("prompt_tokens_details") for chunk in (*chunks, last)]
    assert details[:-1] == [None] * len(chunks) and details[-1] is not None
