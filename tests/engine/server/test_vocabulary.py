"""Tokens one by one."""

from __future__ import annotations

from engine.server.vocabulary import Vocabulary
from tests.conftest import tiny_tokenizer


def test_the_bytes_of_tokens_that_are_parts_of_a_character_are_its_bytes() -> None:
    tokenizer = tiny_tokenizer()  # a token is a byte
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer("é 1 €\n")["input_ids"]
    assert bytes(byte for token in tokens for byte in vocabulary.bytes(token)) == "é 1 €\n".encode()
    assert vocabulary.text(tokens[0]) == "\ufffd" and vocabulary.texts(tokens) == "é 1 €\n"


def test_special_tokens_are_shown_as_they_are_written() -> None:
    vocabulary = Vocabulary(tiny_tokenizer())
    assert vocabulary.text(0) == "<|end|>" and bytes(vocabulary.bytes(0)) == b"<|end|>"
