"""Requests in the shapes that agents send: their fields and types, with texts of ours."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.engine.server.figures import until
from tests.engine.server.process import ServerProcess

DRAFT = "https://json-schema.org/draft/2020-12/schema"
STRING = {"type": "string"}
PARAMETERS: dict[str, Any] = {
    "$schema": DRAFT,
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "What to run."},
        "timeout": {"type": "number", "exclusiveMinimum": 0, "default": 10},
        "kind": {"anyOf": [{"const": "short"}, {"type": "string", "pattern": "^[a-z]+$"}]},
        "variables": {"type": "object", "propertyNames": STRING, "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
    "additionalProperties": False,
}
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "It does so.", "parameters": PARAMETERS}}
    for name in ("bash", "read")
]
SYSTEM = "You help.\n<env>\n  Working directory: /home/someone\n  Today's date: Mon May 1 2028\n</env>"
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": (
        "/v1/messages?beta=true",
        {
            "max_tokens": 32000,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.0.0.abc; cc_entrypoint=cli;"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>\nSo it is.\n</system-reminder>"},
                        {"type": "text", "text": "List them.", "cache_control": {"type": "ephemeral"}},
                    ],
                },
                {"role": "system", "content": "Agents there are: none."},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": "a.py",
                            "is_error": False,
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                },
            ],
            "tools": [
                {"name": name, "description": "It does so.", "input_schema": PARAMETERS} for name in ("bash", "read")
            ],
            "metadata": {"user_id": '{"device_id": "0", "session_id": "1"}'},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        },
    ),
    "opencode": (
        "/v1/chat/completions",
        {
            "max_tokens": 300,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "List them."}],
            "tools": OPENAI_TOOLS,
            "tool_choice": "auto",
            **STREAM,
        },
    ),
    "Continue": (
        "/v1/chat/completions",
        {
            "max_tokens": 200,
            "temperature": 0,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "List them."},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
            ],
            "tools": OPENAI_TOOLS,
            **STREAM,
        },
    ),
    "Cline": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "List them."},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
            ],
            "tools": OPENAI_TOOLS,
            "tool_choice": "auto",
            **STREAM,
        },
    ),
    "aider": (
        "/v1/chat/completions",
        {
            "temperature": 0,
            "stream": True,
            "messages": [
                {"role": "system", "content": "Answer with whole files."},
                {"role": "user", "content": "I have added a.py."},
                {"role": "assistant", "content": "Ok."},
                {"role": "user", "content": "Change it."},
            ],
        },
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_agents_request_is_answered(tool_server: ServerProcess, name: str) -> None:
    path, asked = SHAPES[name]
    body = asked | {"model": "tiny", "max_tokens": 20}
    answer = httpx.post(tool_server.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events and not any("error" in event for event in events)


def test_claude_codes_next_conversation_finds_its_system_text_and_tools(tool_server: ServerProcess) -> None:
    """Its first block differs, and so does what is asked."""
    path, asked = SHAPES["Claude Code"]
    found = []
    for line in ("abc", "def"):
        first = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1.0.0.{line};"}
        body = asked | {"model": "tiny", "max_tokens": 1, "stream": False, "seed": 1}
        body |= {"system": [first, *asked["system"][1:]], "messages": [{"role": "user", "content": f"{line}?"}]}
        before = len(tool_server.requests())
        httpx.post(tool_server.url + path, json=body, timeout=120).raise_for_status()
        until(lambda before=before: len(tool_server.requests()) > before)  # type: ignore[misc]
        found.append(tool_server.requests()[-1])
    assert found[1]["cached_tokens"] > 0.9 * found[1]["prompt_tokens"]
