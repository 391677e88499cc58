"""Tokens become text as they arrive: whole characters, the space before a word, and nothing of a stop text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.stream import TextStream
from engine.text.token_pieces import raw_bytes
from tests.conftest import sentencepiece_tokenizer, tiny_tokenizer

PIECES = sentencepiece_tokenizer()
TOKENIZER = tiny_tokenizer()  # one token per byte, so that every character beyond ASCII is split


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def shown_by(stream: TextStream, tokens: list[int]) -> str:
    """What is shown of all these tokens, which is the stream's text at the end."""
    shown = ""
    for token in tokens:
        stream.push(token)
        shown += stream.take()
    shown += stream.take(final=True)
    assert shown == stream.text
    return shown


def bytes_of(tokenizer: Any, code: bytes) -> list[int]:
    """One token per byte."""
    if tokenizer is TOKENIZER:
        letters = {letter: token for token in range(4, 260) for letter in [raw_bytes(tokenizer, token)]}
        return [letters[bytes([byte])] for byte in code]
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in code]


@given(st.text(max_size=30))
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    assert shown_by(TextStream(TOKENIZER), tokens_of(text)) == text


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, tokens: list[int], **options: Any) -> Any:
        self.decoded += len(tokens)
        return self._tokenizer.decode(tokens, **options)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("code", ["\ufffd".encode(), b"\x80", b"\xc3", b"\xf0\x9f", b"a"], ids=str)
def test_a_text_of_any_characters_flows_and_each_token_is_read_a_few_times(tokenizer: Any, code: bytes) -> None:
    counted = Counted(tokenizer)
    stream, shown, tokens = TextStream(counted), "", bytes_of(tokenizer, code * 300)
    for count, token in enumerate(tokens, 1):
        stream.push(token)
        shown += stream.take()
        assert count // len(code) - len(shown) <= 1
    assert shown + stream.take(final=True) == stream.text == (code * 300).decode("utf8", "replace")
    assert counted.decoded < 10 * len(tokens)


@given(st.binary(max_size=24), st.sampled_from(["bytes", "pieces"]))
@example(b"\x80 ", "pieces")  # a decoder drops a space that stands alone
@example("é".encode()[:1], "bytes")
def test_bytes_that_are_no_text_show_as_a_decoder_of_utf8_shows_them(code: bytes, kind: str) -> None:
    tokenizer, code = (TOKENIZER, code) if kind == "bytes" else (PIECES, b"a" + code)  # which drops a first space
    assert shown_by(TextStream(tokenizer), bytes_of(tokenizer, code)) == code.decode("utf8", "replace")


def test_half_a_character_is_not_shown() -> None:
    stream = TextStream(TOKENIZER)
    stream.push(tokens_of("é")[0])
    assert stream.take() == ""


def test_an_answer_of_tokens_that_show_nothing_is_not_read_again_and_again() -> None:
    counted = Counted(TOKENIZER)
    stream = TextStream(counted)
    for token in [*tokens_of("a"), *tokens_of("<|end|>") * 300, *tokens_of("b")]:
        stream.push(token)
    assert stream.text == "ab" and counted.decoded < 20


@pytest.mark.parametrize("before", [["<s>", "\u2581a"], ["\u2581a"] * 9, []])
def test_an_answer_keeps_its_first_space_behind_a_prompt(before: list[str]) -> None:
    prompt, answer = (PIECES.convert_tokens_to_ids(pieces) for pieces in (before, ["\u2581world", "\u2581a"]))
    assert shown_by(TextStream(PIECES, before=prompt), answer) == (" world a" if before else "world a")


@pytest.mark.parametrize(
    ("prompt", "begins", "code"),
    [("a\U0001f600\U0001f600", [], "\U0001f600"), ("a\U0001f600\n\n\n", [], "\n"), ("a", ["<s>"], "")],
)
def test_what_stands_before_an_answer_spoils_none_of_its_characters(prompt: str, begins: list[str], code: str) -> None:
    before = PIECES(prompt, add_special_tokens=False)["input_ids"]
    answer = [*begins, *(f"<0x{byte:02X}>" for byte in code.encode()), "\u2581world"]
    stream = TextStream(PIECES, before=before)
    assert shown_by(stream, PIECES.convert_tokens_to_ids(answer)) == f"{code} world"


def test_a_character_whose_first_half_is_the_prompts_is_not_lost() -> None:
    first, *others = tokens_of("\u4f60!")
    text = shown_by(TextStream(TOKENIZER, before=[*tokens_of("abcdefgh"), first]), others)
    assert text.endswith("!") and len(text) > 1


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
)
def test_the_text_ends_before_the_first_stop_string_that_counts_and_none_of_it_was_shown(
    text: str, stops: list[str], ignored: int
) -> None:
    stream = TextStream(TOKENIZER, stops)
    shown = ""
    for count, token in enumerate(tokens_of(text), 1):
        if stream.push(token, may_stop=count > ignored):
            break
        shown += stream.take()
    shown += stream.take(final=True)
    # a stop string is found when its last character arrives, the one that began first wins
    ends = [end for end in range(ignored + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        seen = text[: ends[0]]
        expected = min((seen.removesuffix(stop) for stop in stops), key=len)
    assert shown == stream.text == expected
    assert expected + stream.stop_text == (text[: ends[0]] if ends else text)


def test_special_tokens_are_shown_where_they_are_part_of_the_text() -> None:
    for special, text in ((False, "hi"), (True, "<|user|>hi")):
        assert shown_by(TextStream(TOKENIZER, special=special), tokens_of("<|user|>hi")) == text


def test_a_stop_text_that_is_a_special_token_ends_the_answer_before_it() -> None:
    (end,), (user,) = tokens_of("<|assistant|>"), tokens_of("<|user|>")
    stream = TextStream(TOKENIZER, ("<|assistant|>", "never"))
    assert not any(stream.push(token) for token in [*tokens_of("abc"), user])  # which only resembles it
    assert not stream.push(end, may_stop=False)
    assert stream.push(end) and stream.stop_text == "<|assistant|>"
    assert stream.take(final=True) == stream.text == "abc"
