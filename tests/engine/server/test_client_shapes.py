"""Requests in the shapes that agents and editors send: their fields and types, with texts of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.server.messages.billing import BILLING_LINE
from tests.engine.server.figures import logged
from tests.engine.server.process import ServerProcess, serving
from tests.engine.server.test_response_tools import CODEX, CODEX_FIRST, CODEX_SECOND
from tests.engine.server.tool_model import save_tool_model
from tests.engine.text.strict_templates import GUARDS

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
STRING = {"type": "string"}
PARAMETERS: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
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
NAMES = ("bash", "read")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
CACHED = {"cache_control": {"type": "ephemeral"}}
SYSTEM = "You help.\n<env>\n  Working directory: /home/someone\n  Today's date: Mon May 1 2028\n</env>"
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
BEGINS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "List them."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a.py"}
PARTS = [{"type": "text", "text": "<task>Rename it.</task>"}, {"type": "text", "text": "<files>a.py</files>"}]
CLAUDE_CODE: dict[str, Any] = {
    "system": [
        {"type": "text", "text": f"{BILLING_LINE}: cc_version=1.0.0.abc; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": SYSTEM, **CACHED},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nSo it is.\n</system-reminder>"}]},
        {"role": "system", "content": "Agents there are: none."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False, **CACHED}
            ],
        },
    ],
    "tools": [{"name": name, "description": "It does so.", "input_schema": PARAMETERS} for name in NAMES],
    "metadata": {"user_id": '{"device_id": "0", "session_id": "1"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": ("/v1/messages?beta=true", {"stream": True, **CLAUDE_CODE}),
    "opencode": (CHAT, {"messages": BEGINS, "tools": TOOLS, "tool_choice": "auto", **STREAM}),
    "opencode's title": (CHAT, {"messages": [BEGINS[0], BEGINS[0], BEGINS[1]], "temperature": 0.5, **STREAM}),
    "Codex": (RESPONSES, {**CODEX, "instructions": SYSTEM, "input": [*CODEX_FIRST, *CODEX_SECOND], "stream": True}),
    "Cline": (
        CHAT,
        {
            "messages": [BEGINS[0], {"role": "user", "content": PARTS}, CALLED, RESULT],
            "temperature": 0,
            "tools": TOOLS,
            "parallel_tool_calls": False,
            **STREAM,
        },
    ),
    "Continue's agent": (
        CHAT,
        {"messages": [*BEGINS, CALLED | {"content": ""}, RESULT], "tools": TOOLS, "stop": ["<|im_end|>"], **STREAM},
    ),
    "aider": (
        CHAT,
        {
            "messages": [*BEGINS, {"role": "assistant", "content": "Ok."}, BEGINS[1], BEGINS[0]],
            "temperature": 0,
            "stream": True,
        },
    ),
    "Continue's completion": (
        "/v1/completions",
        {
            "prompt": "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>",
            "temperature": 0.01,
            "stop": ["<|endoftext|>", "<|fim_prefix|>", "/src/", "#- coding: utf-8", "```"],
            "stream": True,
        },
    ),
    "llama.vim's instruction": (
        CHAT,
        {
            "model": "",
            "messages": [{"role": "user", "content": "Rename it."}],
            "id_slot": 1,
            "min_p": 0.1,
            "temperature": 0.1,
            "samplers": ["min_p", "temperature"],
            "cache_prompt": True,
            "stream": True,
        },
    ),
    "llama.vim's": ("/v1/completions", {"prompt": "def f(", "suffix": "): pass", "temperature": 0.1, "stream": True}),
}


def check_answered(server: ServerProcess, name: str) -> None:
    path, asked = SHAPES[name]
    events = server.events(path, **{"max_output_tokens" if path == RESPONSES else "max_tokens": 20}, **asked)
    assert events and not any("error" in event for event in events)
    if path == RESPONSES:
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
    elif "messages?" not in path:
        assert any(event["choices"] and event["choices"][0]["finish_reason"] for event in events)
        assert ("usage" in events[-1]) == ("stream_options" in asked)


@pytest.mark.parametrize("name", SHAPES)
def test_a_clients_request_is_answered(tool_server: ServerProcess, name: str) -> None:
    check_answered(tool_server, name)


@pytest.fixture(scope="module", params=["Qwen 3.5", "Mistral"])
def strict_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server whose chat template is as strict about roles as the named model's."""
    model = save_tool_model(tmp_path_factory.mktemp("strict"), GUARDS[request.param])
    with serving("--set", f"model={model}", "--served-model-name", "tiny", "--method", "none") as running:
        yield running


@pytest.mark.parametrize("name", SHAPES)
def test_a_clients_request_is_answered_where_the_template_is_strict(strict_server: ServerProcess, name: str) -> None:
    check_answered(strict_server, name)


def test_llama_vims_warming_up_for_an_instruction_is_answered_and_its_fields_are_named(
    tool_server: ServerProcess,
) -> None:
    fields = {"id_slot": 1, "samplers": [], "cache_prompt": True, "response_fields": [""]}
    said = [{"role": "user", "content": "Rename it."}]
    answer = tool_server.ask(CHAT, model="", messages=said, n_predict=0, **fields)
    assert answer["metrics"]["ignored"] == sorted(fields)
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tiny", 1)


def test_claude_codes_next_conversation_finds_its_system_text_and_tools(tool_server: ServerProcess) -> None:
    """Its first block differs, and so does what is asked."""
    found = []
    for line in ("abc", "def"):
        first = {"type": "text", "text": f"{BILLING_LINE}: cc_version=1.0.0.{line};"}
        said = {"system": [first, *CLAUDE_CODE["system"][1:]], "messages": [{"role": "user", "content": f"{line}?"}]}
        tool_server.ask("/v1/messages", **CLAUDE_CODE | said, max_tokens=1, seed=1)
        found.append(tool_server.logged())
    assert found[1]["cached_tokens"] > 0.9 * found[1]["prompt_tokens"]
    logged(tool_server, f"ignored field: system: {BILLING_LINE}:")
