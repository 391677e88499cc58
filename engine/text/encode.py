"""Encodes text and chat messages as tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.errors import HALF_A_CHARACTER, RequestError, is_text, shown
from engine.text.chat import Rendering, chat_tokens
from engine.text.role_order import render_accepted

_PART = re.compile(r"\btext\b")
"""What a chat template names that reads the parts of a message's content."""


def encode_text(
    tokenizer: Any, prompt: str | Sequence[Any], raw: bool = False, rendering: Rendering | None = None
) -> list[int]:
    """Return the token ids of a text (one user message, unless `raw`) or of chat messages, through the chat template.

    What a message spells never becomes a special token; a text that is taken as it is (`raw`, or without a template)
    may spell special tokens. Where such a text has no tokens, the result is the token that begins texts, if the
    tokenizer has one. Raises RequestError for messages that it cannot take.
    """
    if isinstance(prompt, str):
        if raw or not tokenizer.chat_template:
            return _raw_tokens(tokenizer, prompt)
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise RequestError("prompt: this model has no chat template; give text or token ids, or set chat_template=FILE")
    messages: Sequence[Any] = prompt
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise RequestError(f"prompt: {shown(message)} is no chat message; each needs role and content")
    rendering = rendering or Rendering()
    if _PART.search(str(tokenizer.chat_template)) is None:
        messages = [_with_one_text(message) for message in messages]
    messages, text = render_accepted(tokenizer, messages, rendering)
    _check_text(text)
    return chat_tokens(tokenizer, messages, text, rendering)


def _with_one_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is parts of text alone, as OpenAI has them, with one text: a template that reads
    no parts would show the list as Python writes it.
    """
    parts = message["content"]
    if not isinstance(parts, list | tuple) or not parts:
        return message
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(map(str, texts))}


def _raw_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that may spell special ones. Where the text spells the token that the tokenizer
    begins texts with, it is not there twice.
    """
    _check_text(text)
    tokens: list[int] = list(tokenizer(text)["input_ids"])
    begins, spelled = tokenizer.bos_token_id, tokenizer.bos_token
    if not tokens and begins is not None:
        return [begins]
    twice = begins is not None and tokens[:2] == [begins, begins] and text.lstrip().startswith(spelled)
    return tokens[1:] if twice else tokens


def _check_text(text: str) -> None:
    if not is_text(text):
        raise RequestError(f"prompt: {HALF_A_CHARACTER}")
