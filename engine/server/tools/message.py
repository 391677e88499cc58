"""The message of one answer as it grows: its text, its reasoning and its calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.answer import Result
from engine.server.answers import Chunk, FinishReason
from engine.text.answer_format import AnswerFormat
from engine.text.answer_reader import AnswerReader

REASONS: dict[str, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}
_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24


@dataclass(frozen=True)
class Delta:
    """A part by which a message grows. kind: "content", "reasoning", "call" (text is the tool's name) or "arguments".
    call: the number of the call, and its id.
    """

    kind: str
    text: str
    call: int = -1
    call_id: str = ""


@dataclass
class MessageParts:
    """A whole message. calls: as OpenAI's objects."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class ChatAnswer:
    """One answer. `feed` and `end` for a stream, `whole` for all of it."""

    def __init__(self, reader: AnswerReader, format_: AnswerFormat):
        self._reader, self._format = reader, format_
        self._ids: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        """Return what the text adds."""
        return [self._delta(*part) for part in self._reader.feed(text)]

    def end(self) -> list[Delta]:
        """Return what was held back, once the answer is complete."""
        return [self._delta(*part) for part in self._reader.end()]

    def whole(self, text: str) -> MessageParts:
        """Return the message of an answer's text."""
        message = MessageParts()
        for delta in [*self.feed(text), *self.end()]:
            if delta.kind == "call":
                function = {"name": delta.text, "arguments": ""}
                message.calls.append({"id": delta.call_id, "type": "function", "function": function})
            elif delta.kind == "arguments":
                message.calls[-1]["function"]["arguments"] += delta.text
            else:
                setattr(message, delta.kind, getattr(message, delta.kind) + delta.text)
        return message

    def reason(self, result: Result) -> FinishReason:
        """Return why the answer ended, once all of it has been fed."""
        return "tool_calls" if self._ids and result.finish_reason == "eos" else REASONS[result.finish_reason]

    def _delta(self, kind: str, text: str) -> Delta:
        if kind == "call":
            self._ids.append(self._new_id())
        if kind in ("call", "arguments"):
            return Delta(kind, text, len(self._ids) - 1, self._ids[-1])
        return Delta(kind, text)

    def _new_id(self) -> str:
        length = None if self._format.tools is None else self._format.tools.id_length
        letters = "".join(secrets.choice(_LETTERS) for _ in range(length or _ID_LENGTH))
        return letters if length else f"call_{letters}"


def delta_of(deltas: Sequence[Delta]) -> Chunk:
    """Return OpenAI's delta of a round; empty if it adds nothing."""
    delta: Chunk = {}
    calls: dict[int, dict[str, Any]] = {}
    for one in deltas:
        if one.kind == "call":
            function = {"name": one.text, "arguments": ""}
            calls[one.call] = {"index": one.call, "id": one.call_id, "type": "function", "function": function}
        elif one.kind == "arguments":
            calls.setdefault(one.call, {"index": one.call, "function": {"arguments": ""}})
            calls[one.call]["function"]["arguments"] += one.text
        else:
            name = "reasoning_content" if one.kind == "reasoning" else one.kind
            delta[name] = delta.get(name, "") + one.text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
