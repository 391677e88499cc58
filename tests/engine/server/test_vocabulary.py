"""Tokens one by one."""

from __future__ import annotations

from engine.server.vocabulary import Vocabulary
from tests.conftest import sentencepiece_tokenizer, tiny_tokenizer


def test_words_keep_the_space_before_them() -> None:
    tokenizer = sentencepiece_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    world = tokenizer.convert_tokens_to_ids("\u2581world")
    assert vocabulary.text(world) == " world" and bytes(vocabulary.bytes(world)) == b" world"
    halves = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0x0A>"])
    assert [vocabulary.text(half) for half in halves] == ["\ufffd", "\ufffd", "\n"]
    assert bytes(byte for half in halves for byte in vocabulary.bytes(half)) == "é\n".encode()
    assert vocabulary.text(tokenizer.bos_token_id) == "<s>"


def test_tokens_of_a_prompt_begin_where_its_text_has_them() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(["<s>", "\u2581a", "\u2581world", "<0xC3>", "<0xA9>", "a"])
    assert Vocabulary(tokenizer).prompt_offsets(tokens, "a worldéa") == [0, 0, 1, 7, 7, 8]
    shown = tiny_tokenizer()("<|user|>é!")["input_ids"]
    assert Vocabulary(tiny_tokenizer()).prompt_offsets(shown, "<|user|>é!") == [0, 8, 8, 9]


def test_the_bytes_of_tokens_that_are_parts_of_a_character_are_its_bytes() -> None:
    tokenizer = tiny_tokenizer()  # a token is a byte
    vocabulary = Vocabulary(tokenizer)
    tokens = tokenizer("é 1 €\n")["input_ids"]
    assert bytes(byte for token in tokens for byte in vocabulary.bytes(token)) == "é 1 €\n".encode()
    assert vocabulary.text(tokens[0]) == "\ufffd" and vocabulary.texts(tokens) == "é 1 €\n"


def test_special_tokens_are_shown_as_they_are_written() -> None:
    vocabulary = Vocabulary(tiny_tokenizer())
    assert vocabulary.text(0) == "<|end|>" and bytes(vocabulary.bytes(0)) == b"<|end|>"
