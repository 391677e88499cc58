"""Requests for responses as chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.responses.schema import (
    ContentText,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    JsonFormat,
    MessageItem,
    NamedFunctionTool,
    ReasoningItem,
    ResponsesRequest,
)
from engine.server.tools.calling import SchemaPaths

Message = dict[str, Any]
_SAME = ("model", "temperature", "top_p", "seed", "stream", "user", "chat_template_kwargs")


def chat_fields(body: ResponsesRequest, conversation: Sequence[Message]) -> dict[str, Any]:
    """The fields of a chat request. conversation: its messages, but for the instructions."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields |= {"messages": [*system, *conversation], "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        functions = [tool.model_dump(include={"name", "description", "parameters", "strict"}) for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
        choice = body.tool_choice
        fields["tool_choice"] = choice
        if isinstance(choice, NamedFunctionTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.text is not None and (format_ := body.text.format) is not None:
        plain = format_.model_dump(by_alias=True)
        kind = plain.pop("type")
        fields["response_format"] = {"type": kind} | ({kind: plain} if isinstance(format_, JsonFormat) else {})
    fields["speculation"] = None if body.speculation is None else body.speculation.model_dump()
    return fields


def schema_paths(body: ResponsesRequest) -> SchemaPaths:
    """Return what the client calls its schemas."""
    return SchemaPaths([f"tools[{place}].parameters" for place in range(len(body.tools or ()))], "text.format.schema")


def conversation_of(given: str | Sequence[Item]) -> list[Message]:
    """The chat messages of a request's input. Reasoning, text and calls that follow each other are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            _join(messages, item)
    return messages


def _join(messages: list[Message], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    """Add a part of an assistant's message, to the last one where that has nothing of the kind yet."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
    elif isinstance(item, ReasoningItem):
        if thought := "".join(part.text for part in item.content or ()):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif last is not None and not last["content"] and "tool_calls" not in last:
        last["content"] = _text(item.content)
    else:
        messages.append({"role": "assistant", "content": _text(item.content)})


def _text(content: str | Sequence[ContentText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
