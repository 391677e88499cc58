"""Translates Anthropic's requests to chat requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.server.messages.billing import without_billing_line
from engine.server.messages.schema import (
    ClientTool,
    CountRequest,
    InputMessage,
    MessagesRequest,
    ResultPart,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from engine.server.tools.calling import ClientNames

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SCHEMA = "output_config.format.schema"
_SAME = ("temperature", "top_p", "top_k", "seed", "stream", "max_tokens")


def chat_fields(body: CountRequest) -> dict[str, Any]:
    """Return the fields of a chat request."""
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.client_tools:
        fields["tools"] = [_tool(tool) for tool in body.client_tools.values()]
    if (choice := body.tool_choice) is not None and body.client_tools:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in _SAME} | {"stop": body.stop_sequences}
        fields["speculation"] = None if body.speculation is None else body.speculation.model_dump()
    return fields


def client_names(body: CountRequest) -> ClientNames:
    """Return what the client calls the parts of its request."""
    tools = [f"tools[{place}].input_schema" for place in body.client_tools]
    return ClientNames(tools, _SCHEMA, {"response_format.json_schema.schema": _SCHEMA, "stop": "stop_sequences"})


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    texts = without_billing_line(body.system)
    system = [{"role": "system", "content": "\n".join(texts)}] if texts else []
    return [*system, *(one for message in body.messages for one in _plain(message))]


def _plain(message: InputMessage) -> list[dict[str, Any]]:
    """Return a message as one or more of the chat's: a tool's results come before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    content = message.content
    text = _text([block for block in content if isinstance(block, TextBlock)])
    if message.role != "assistant":
        results = [block for block in content if isinstance(block, ToolResultBlock)]
        said = [{"role": message.role, "content": text}] if text or not results else []
        return [*map(_result, results), *said]
    thoughts = "".join(block.thinking for block in content if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in content
        if isinstance(block, ToolUseBlock)
    ]
    return [{"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": thoughts or None}]


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error and not text.startswith("Error") else text,
    }


def _text(content: str | Sequence[ResultPart]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
