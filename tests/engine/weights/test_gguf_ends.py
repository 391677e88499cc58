"""Answers of a GGUF file end where llama.cpp ends them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.weights.tiny_gguf import CONTROL, NORMAL, TOKENS, USER_DEFINED

COUNT = 4
"""Tokens in the place of the tiny vocabulary's control tokens."""


@pytest.fixture
def ends(directory: Callable[..., Path]) -> Callable[..., list[int] | None]:
    """Tell the ends of a file with these first tokens that names none, all of one kind."""

    def ends(tokens: list[str], kind: int = CONTROL) -> list[int] | None:
        names = [tokens[i] if i < len(tokens) else f"<|{i}|>" for i in range(COUNT)]
        values = {
            "tokenizer.ggml.tokens": [*names, *TOKENS[COUNT:]],
            "tokenizer.ggml.token_type": [kind] * COUNT + [NORMAL] * (len(TOKENS) - COUNT),
            "tokenizer.ggml.eos_token_id": None,
            "tokenizer.chat_template": None,
        }
        found: list[int] | None = json.loads(
            (directory(values=values) / "generation_config.json").read_text(encoding="utf8")
        ).get("eos_token_id")
        return found

    return ends


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], [1, 2]),
        (["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], [1, 2, 3]),
        (["<｜User｜>", "<｜end▁of▁sentence｜>"], [1]),
        (["<|user|>", "<|end|>", "<|endoftext|>"], [1, 2]),
        (["<s>", "</s>"], [1]),
    ],
)
def test_tokens_that_end_answers_are_known_by_their_text(
    ends: Callable[..., list[int] | None], tokens: list[str], found: list[int]
) -> None:
    assert ends(tokens) == found


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], [1, 2]),
        (["<|end|>", "<|flush|>", "<|calls|>"], [1, 2]),
        (["<|end|>", "<|return|>"], [0, 1]),
        (["</s>", "<|tool_response>", "<turn|>"], [1, 2]),
    ],
)
def test_a_token_that_ends_only_a_message_where_others_end_the_answer_is_none(
    ends: Callable[..., list[int] | None], tokens: list[str], found: list[int]
) -> None:
    assert ends(tokens) == found


@pytest.mark.parametrize(
    ("tokens", "kind", "found"), [(["</s>", "<|im_end|>"], USER_DEFINED, [1]), (["<|0|>", "<|im_end|>"], NORMAL, None)]
)
def test_a_tag_of_html_and_a_word_that_is_spelled_like_an_end_are_none(
    ends: Callable[..., list[int] | None], tokens: list[str], kind: int, found: list[int] | None
) -> None:
    assert ends(tokens, kind) == found
