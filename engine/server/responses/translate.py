"""Translates requests for responses to chat requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.server.errors import ApiError
from engine.server.responses.functions import SHELL, ShownTool, arguments_of, flat
from engine.server.responses.items import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    LocalShellCallItem,
    MessageItem,
    OwnCall,
    ReasoningItem,
    ShellOutputItem,
    text_of,
)
from engine.server.responses.schema import JsonFormat, ResponsesRequest
from engine.server.responses.tools import AllowedToolsChoice, NamedToolChoice
from engine.server.tools.calling import ClientNames

Message = dict[str, Any]
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
_SAME = ("model", "temperature", "top_p", "seed", "stream", "user", "chat_template_kwargs")


def chat_fields(body: ResponsesRequest, conversation: Sequence[Message], tools: Sequence[ShownTool]) -> dict[str, Any]:
    """Return the fields of a chat request. conversation: its messages, except for the instructions. tools: those of the
    request. Raises ApiError for a choice of tools that do not exist.
    """
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields["messages"] = [*system, *conversation] or [{"role": "user", "content": ""}]
    fields["max_completion_tokens"] = body.max_output_tokens
    if tools:
        fields["tools"] = [{"type": "function", "function": tool.function} for tool in tools]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if tools or body.tool_choice != "auto":
        fields["tool_choice"] = _choice(body, tools)
    if body.text is not None and (format_ := body.text.format) is not None:
        plain = format_.model_dump(by_alias=True)
        kind = plain.pop("type")
        fields["response_format"] = {"type": kind} | ({kind: plain} if isinstance(format_, JsonFormat) else {})
    fields["speculation"] = None if body.speculation is None else body.speculation.model_dump()
    return fields


def client_names(tools: Sequence[ShownTool]) -> ClientNames:
    """Return what the client calls the parts of its request."""
    return ClientNames([tool.path for tool in tools], _FIELDS["response_format.json_schema.schema"], _FIELDS)


def _choice(body: ResponsesRequest, tools: Sequence[ShownTool]) -> Any:
    """Return the choice of tools as chat writes it."""
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        if (named := next((tool for tool in tools if tool.is_named(choice)), None)) is None:
            raise _none_of("tool_choice.name", choice.name, tools)
        return _function(named)
    if isinstance(choice, AllowedToolsChoice):
        allowed = [tool for tool in tools if any(tool.is_named(one) for one in choice.tools)]
        if not allowed:
            raise _none_of("tool_choice.tools", choice.tools[0].name or choice.tools[0].type, tools)
        chosen = {"mode": choice.mode, "tools": [_function(tool) for tool in allowed]}
        return {"type": "allowed_tools", "allowed_tools": chosen}
    return choice


def _function(tool: ShownTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.function["name"]}}


def _none_of(field: str, name: str, tools: Sequence[ShownTool]) -> ApiError:
    names = [tool.function["name"] for tool in tools[:8]]
    return ApiError(400, f"{field}: {name[:64]!r} is none of the tools {names}", param=field)


def conversation_of(given: str | Sequence[Item]) -> list[Message]:
    """Return the chat messages of a request's input. Reasoning, text and calls that follow each other are
    one message.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, ShellOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.id, "content": item.output})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, MessageItem | ReasoningItem | OwnCall):
            _join(messages, item)
    return messages


def _join(messages: list[Message], item: MessageItem | ReasoningItem | OwnCall) -> None:
    """Add a part of an assistant's message, to the last one where that has nothing of the kind yet."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, OwnCall):
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(_call(item))
    elif isinstance(item, ReasoningItem):
        if thought := "".join(part.text for part in item.content or ()):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif last is not None and not last["content"] and "tool_calls" not in last:
        last["content"] = text_of(item.content)
    else:
        messages.append({"role": "assistant", "content": text_of(item.content)})


def _call(item: OwnCall) -> dict[str, Any]:
    """Return a call as chat writes it."""
    if isinstance(item, FunctionCallItem):
        name, arguments = flat(item.name, item.namespace), item.arguments
    elif isinstance(item, CustomCallItem):
        name, arguments = flat(item.name, item.namespace), arguments_of(item.input)
    else:
        action = item.action.model_dump(exclude={"type"}, exclude_none=True)
        name, arguments = SHELL, json.dumps({key: value for key, value in action.items() if value != {}})
    number = (item.call_id or item.id) if isinstance(item, LocalShellCallItem) else item.call_id
    return {"id": number or "", "function": {"name": name, "arguments": arguments}}
