"""Prompt files: JSON lines with a `prompt` text, and optionally the target's answer to it as token ids."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from engine.core.errors import ConfigError
from engine.files.json_lines import BadLine, json_lines


class PromptRow(msgspec.Struct):
    """A line of a prompt file. tokens: the answer, where it is known."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    tokens: list[int] | None = None


def read_prompts(path: Path, key: str) -> Iterator[PromptRow]:
    """Yield the lines of a JSONL file, plain or .xz. key: the option that names the file, for the ConfigError of a bad
    line.
    """
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
            for _, row in json_lines(file, PromptRow):
                yield row
    except BadLine as error:
        raise ConfigError(
            f'{key}={path}: line {error.number} is not a JSON object with a "prompt", a text ({error.reason}): give a '
            "JSONL file"
        ) from None
    except (OSError, lzma.LZMAError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}={path}: cannot be read ({why}): give a JSONL file, plain or .xz") from None
