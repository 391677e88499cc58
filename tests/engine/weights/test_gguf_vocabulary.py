"""Tokens of a text are those that llama.cpp makes of it with the same GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.text.encode import encode_text
from engine.weights.tokenizer import load_tokenizer
from tests.engine.weights.tiny_gguf import BYTE, CONTROL, NORMAL, SPECIAL, TEMPLATE, TOKENS, UNKNOWN, USER_DEFINED

DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]

MARKS = ["<unk>", "<s>", "</s>", "<|user|>", "<|endoftext|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "▁a"]


@pytest.fixture
def sentencepiece(directory: Callable[..., Path]) -> Callable[..., Any]:
    """Make the tokenizer of a SentencePiece vocabulary."""
    tokens = [*MARKS, *BYTES, *WORDS]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [UNKNOWN, *[CONTROL] * 4, *[BYTE] * len(BYTES), *[NORMAL] * len(WORDS)],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.vocab_size": None,
    }
    return lambda **changes: load_tokenizer(str(directory(values=values | changes)))


def pieces(tokenizer: Any, text: str) -> str:
    """The tokens of a text, with bars between them."""
    return "|".join(map(tokenizer.convert_ids_to_tokens, tokenizer.encode(text, add_special_tokens=False)))


def test_control_tokens_of_letters_that_no_byte_has_keep_their_ids(directory: Callable[..., Path]) -> None:
    template = "{{ bos_token }}" + TEMPLATE
    for ours, theirs in zip(SPECIAL, DEEPSEEK, strict=True):
        template = template.replace(ours, theirs)
    values = {"tokenizer.ggml.tokens": [*DEEPSEEK, *TOKENS[4:]], "tokenizer.chat_template": template}
    tokenizer = load_tokenizer(str(directory(values=values)))
    assert encode_text(tokenizer, "hi") == [0, 1, TOKENS.index("h"), TOKENS.index("i"), 3, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 3, len(TOKENS))


def test_a_token_of_spaces_that_the_user_defined_is_none_of_the_vocabularys_own(directory: Callable[..., Path]) -> None:
    place = TOKENS.index("~")
    kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(TOKENS) - len(SPECIAL))
    kinds[place] = USER_DEFINED
    named = ["  " if token == "~" else token for token in TOKENS]
    values = {"tokenizer.ggml.tokens": named, "tokenizer.ggml.token_type": kinds}
    tokenizer = load_tokenizer(str(directory(values=values)))
    ids = tokenizer.encode("a  a")
    assert ids == [TOKENS.index("a"), place, TOKENS.index("a")]
    assert tokenizer.decode(ids) == "a  a" and tokenizer.convert_ids_to_tokens(TOKENS.index("ĠĠ")) == "ĠĠ"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", "▁a"),
        (" a", "▁|▁a"),
        ("\na", "▁|<0x0A>|a"),
        ("<s> a</s>a", "<s>|▁|▁a|</s>|▁a"),
        ("<|user|>\n<|user|>", "<|user|>|▁|<0x0A>|<|user|>"),
    ],
)
def test_a_text_of_sentencepiece_has_a_space_before_it_and_after_every_control_token(
    sentencepiece: Callable[..., Any], text: str, found: str
) -> None:
    assert pieces(sentencepiece(), text) == found


def test_a_text_of_sentencepiece_has_no_space_before_it_where_the_file_says_so(
    sentencepiece: Callable[..., Any],
) -> None:
    tokenizer = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    assert pieces(tokenizer, "a a</s>a</s> a") == "a|▁a|</s>|a|</s>|▁a"
    assert tokenizer.decode(tokenizer.encode(" a a", add_special_tokens=False)) == " a a"


@pytest.mark.parametrize(
    ("text", "found"),
    [("<|user|> \n a</s>\na", "<|user|>|▁a|</s>|▁a"), ("<s> a<|endoftext|> a", "<s>|▁|▁a|<|endoftext|>|▁|▁a")],
)
def test_control_tokens_of_phi_3_take_the_white_space_after_them(
    sentencepiece: Callable[..., Any], text: str, found: str
) -> None:
    assert pieces(sentencepiece(**{"general.name": "Phi3"}), text) == found
