"""Writes the calls of earlier answers into their texts, for chat templates that show a message's text alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.answer_format import AnswerFormat, ToolFormat


def with_calls_in_texts(tokenizer: Any, messages: Sequence[Any]) -> Sequence[Any]:
    """Return the messages, with calls as part of the text where the chat template does not name `tool_calls`: such
    models are given their calls as they wrote them.
    """
    if "tool_calls" in str(tokenizer.chat_template) or not any(_calls(message) for message in messages):
        return messages
    tools = AnswerFormat.of(tokenizer).tools
    return messages if tools is None else [_with_text(tools, message) for message in messages]


def written(tools: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as a model writes them. calls: as OpenAI has them, whose arguments are an object."""
    texts = (
        tools.begin + call["name"] + tools.middle + _arguments(tools, call.get("arguments") or {}) + tools.end
        for call in (call["function"] for call in calls)
    )
    return tools.opens + tools.between.join(texts) + tools.closes


def _arguments(tools: ToolFormat, arguments: Mapping[str, Any]) -> str:
    if tools.arguments == "python":
        return ", ".join(f"{key}={_json(value)}" for key, value in arguments.items())
    return _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _with_text(tools: ToolFormat, message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not (calls := _calls(message)):
        return message
    text = message.get("content") or ""
    if not isinstance(text, str):  # parts of a message
        text = "".join(part.get("text", "") for part in text)
    return {**message, "content": text + written(tools, calls)}
