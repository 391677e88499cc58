"""Prompt files: JSON lines with a `prompt` text, and optionally the target's answer to it as token ids; or with the
messages of a chat.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from engine.core.errors import ConfigError
from engine.files.json_lines import BadLine, json_lines


class PromptRow(msgspec.Struct):
    """A line of a prompt file. prompt_tokens: ids of the whole prompt, where it is more than one message of a user's.
    tokens: the answer, where it is known.
    """

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    prompt_tokens: list[int] | None = None
    tokens: list[int] | None = None


class ChatRow(msgspec.Struct):
    """A line with a prompt, or with the messages of a chat as OpenAI writes them, and the tools that an answer may
    call.
    """

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs a prompt or messages")

    @property
    def name(self) -> str:
        """A text that tells the prompt from others: the prompt itself, or what the chat is in JSON."""
        chat = {"messages": self.messages, "tools": self.tools}
        return self.prompt if self.prompt is not None else msgspec.json.encode(chat).decode()


Line = TypeVar("Line")


def read_prompts(path: Path, key: str) -> Iterator[PromptRow]:
    """Yield the lines of a JSONL file, plain or .xz. key: the option that names the file, for the ConfigError of a bad
    line.
    """
    return _read(path, key, PromptRow, 'a "prompt", a text')


def read_chats(path: Path, key: str) -> Iterator[ChatRow]:
    """Yield the lines of a JSONL file of prompts and chats, as `read_prompts` does."""
    return _read(path, key, ChatRow, 'a "prompt", a text, or "messages" of a chat')


def _read(path: Path, key: str, kind: type[Line], needed: str) -> Iterator[Line]:
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            for _, row in json_lines(file, kind):
                yield row
    except BadLine as error:
        raise ConfigError(
            f"{key}={path}: line {error.number} is not a JSON object with {needed} ({error.reason}): give a JSONL file"
        ) from None
    except (OSError, lzma.LZMAError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}={path}: cannot be read ({why}): give a JSONL file, plain or .xz") from None
