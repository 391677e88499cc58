"""What coding tools send, as they send it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.engine.server.process import ServerProcess
from tests.engine.server.tool_model import tool

SYSTEM = {"role": "system", "content": "You are a coding assistant."}
QUESTION = [{"type": "text", "text": "<task>Rename it.</task>"}, {"type": "text", "text": "<files>a.py</files>"}]
READ = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "reason": {"type": "string"}},
    "required": ["path"],
}
CALLED = {
    "role": "assistant",
    "content": "I read it.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}
    ],
}
TOOLS = [tool("read_file", READ), tool("list_files", {"type": "object", "properties": {}})]
CHATS: dict[str, dict[str, Any]] = {
    "Cline": {
        "messages": [SYSTEM, {"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "Cline with tools": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": QUESTION},
            CALLED,
            {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"},
            {"role": "user", "content": QUESTION},
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    },
    "Continue's agent": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Rename it."},
            CALLED | {"content": ""},
            {"role": "tool", "content": "x = 1", "tool_call_id": "call_1"},
        ],
        "max_tokens": 64,
        "temperature": 0.5,
        "stream": True,
        "tools": TOOLS,
        "stop": ["<|im_end|>"],
    },
    "aider": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Rename it."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": "a.py\n```\nx = 1\n```"},
            {"role": "system", "content": "Answer in diffs."},
        ],
        "temperature": 0,
        "stream": True,
    },
    "llm": {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": {"include_usage": True}},
}
WRITING = {
    "Continue's completion": {
        "prompt": "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>",
        "temperature": 0.01,
        "stop": ["<|endoftext|>", "<|fim_prefix|>", "/src/", "#- coding: utf-8", "```"],
        "stream": True,
    },
    "llama.vim's": {"prompt": "def f(", "suffix": "): pass", "temperature": 0.1, "stream": False},
}


def chunks(server: ServerProcess, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    sent = {"model": "tiny", "max_tokens": 24} | body
    answer = httpx.post(f"{server.url}{route}", json=sent, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered(tool_server: ServerProcess, name: str) -> None:
    found = chunks(tool_server, "/v1/chat/completions", CHATS[name])
    assert any(chunk["choices"] and chunk["choices"][0]["finish_reason"] for chunk in found)
    assert ("usage" in found[-1]) == ("stream_options" in CHATS[name])


@pytest.mark.parametrize("name", WRITING)
def test_a_text_is_completed(tool_server: ServerProcess, name: str) -> None:
    assert chunks(tool_server, "/v1/completions", WRITING[name])[-1]["choices"][0]["finish_reason"]
