from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.config import load
from engine.core.errors import ConfigError, ModelError, RequestError
from engine.text.chat import Rendering
from engine.text.encode import encode_text
from engine.text.stream import TextStream
from engine.text.token_pieces import raw_bytes
from engine.weights.tokenizer import load_tokenizer, tokenizer_of
from tests.conftest import sentencepiece_tokenizer, tiny_tokenizer

PIECES = sentencepiece_tokenizer()
TOKENIZER = tiny_tokenizer()  # one token per byte, so that every character beyond ASCII is split


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


@given(st.text(max_size=30))
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    stream = TextStream(TOKENIZER)
    pieces = []
    for token in tokens_of(text):
        stream.push(token)
        pieces.append(stream.take())
    pieces.append(stream.take(final=True))
    assert "".join(pieces) == stream.text == text


def test_half_a_character_is_not_shown() -> None:
    stream = TextStream(TOKENIZER)
    first, *_ = tokens_of("é")
    stream.push(first)
    assert stream.take() == ""


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
@pytest.mark.parametrize("code", ["\ufffd".encode(), b"\x80", b"\xc3", b"\xf0\x9f"], ids=str)
def test_a_text_of_replacement_characters_flows_and_each_token_is_read_a_few_times(tokenizer: Any, code: bytes) -> None:
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
def test_bytes_that_are_no_text_show_as_a_decoder_of_utf8_shows_them(code: bytes, kind: str) -> None:
    tokenizer, code = (TOKENIZER, code) if kind == "bytes" else (PIECES, b"a" + code)  # which drops a first space
    stream, shown = TextStream(tokenizer), ""
    for token in bytes_of(tokenizer, code):
        stream.push(token)
        shown += stream.take()
    assert shown + stream.take(final=True) == stream.text == code.decode("utf8", "replace")


def test_an_answer_of_tokens_that_show_nothing_is_not_read_again_and_again() -> None:
    counted = Counted(TOKENIZER)
    stream = TextStream(counted)
    for token in [*tokens_of("a"), *tokens_of("<|end|>") * 300, *tokens_of("b")]:
        stream.push(token)
    assert stream.text == "ab" and counted.decoded < 20


def bytes_of(tokenizer: Any, code: bytes) -> list[int]:
    """One token per byte."""
    if tokenizer is TOKENIZER:
        letters = {letter: token for token in range(4, 260) for letter in [raw_bytes(tokenizer, token)]}
        return [letters[bytes([byte])] for byte in code]
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in code]


@pytest.mark.parametrize("before", [["<s>", "\u2581a"], ["\u2581a"] * 9, []])
def test_an_answer_keeps_its_first_space_behind_a_prompt(before: list[str]) -> None:
    tokenizer = sentencepiece_tokenizer()
    prompt, answer = (tokenizer.convert_tokens_to_ids(pieces) for pieces in (before, ["\u2581world", "\u2581a"]))
    stream, shown = TextStream(tokenizer, before=prompt), ""
    for token in answer:
        stream.push(token)
        shown += stream.take()
    assert shown == stream.text == (" world a" if before else "world a")


@pytest.mark.parametrize(
    ("prompt", "answer", "shown"),
    [
        ("a\U0001f600\U0001f600", "\U0001f600 world", "\U0001f600 world"),
        ("a\U0001f600\n\n\n", "\n world", "\n world"),
        ("a", "<s> world", " world"),
    ],
)
def test_what_stands_before_an_answer_spoils_none_of_its_characters(prompt: str, answer: str, shown: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    stream = TextStream(tokenizer, before=tokenizer(prompt, add_special_tokens=False)["input_ids"])
    for token in pieces_of(tokenizer, answer):
        stream.push(token)
    stream.take(final=True)
    assert stream.text == shown


def test_a_character_whose_first_half_is_the_prompts_is_not_lost() -> None:
    first, *others = tokens_of("\u4f60!")
    stream = TextStream(TOKENIZER, before=[*tokens_of("abcdefgh"), first])
    for token in others:
        stream.push(token)
    stream.take(final=True)
    assert stream.text.endswith("!") and len(stream.text) > 1


def pieces_of(tokenizer: Any, text: str) -> list[int]:
    """Bytes, a special token, and words with the space before them."""
    begins = tokenizer.convert_tokens_to_ids("<s>")
    beginning, text = ([begins], text[3:]) if text.startswith("<s>") else ([], text)
    first, _, word = text.partition(" ")
    codes = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in first.encode()]
    return [*beginning, *codes, tokenizer.convert_tokens_to_ids("\u2581" + word)]


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
        stream = TextStream(TOKENIZER, special=special)
        for token in tokens_of("<|user|>hi"):
            stream.push(token)
        assert stream.text == text


def test_half_a_character_is_no_prompt() -> None:
    with pytest.raises(RequestError, match=r"^prompt: holds half a character"):
        encode_text(TOKENIZER, [{"role": "user", "content": "hi \ud83d"}])


def test_a_model_without_tokenizer_files_is_told_which_to_copy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"has no tokenizer: copy tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_messages_need_role_and_content() -> None:
    with pytest.raises(RequestError, match="role and content"):
        encode_text(TOKENIZER, [{"text": "hi"}])


def test_text_becomes_one_user_message_unless_raw() -> None:
    assert TOKENIZER.decode(encode_text(TOKENIZER, "hi")) == "<|user|>hi<|assistant|>"
    assert TOKENIZER.decode(encode_text(TOKENIZER, "hi", raw=True)) == "hi"


def test_a_chat_template_of_ones_own_is_used(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
    tokenizer = tokenizer_of(load({"model": tiny, "chat_template": str(file)}))
    assert encode_text(tokenizer, "hi") == encode_text(tokenizer, "<hi>", raw=True)
    with pytest.raises(ConfigError, match=r"chat_template=nowhere: cannot be read"):
        tokenizer_of(load({"model": tiny, "chat_template": "nowhere"}))


def test_a_stop_text_that_is_a_special_token_ends_the_answer_before_it() -> None:
    (end,) = tokens_of("<|assistant|>")
    stream = TextStream(TOKENIZER, ("<|assistant|>", "never"))
    assert not any(stream.push(token) for token in tokens_of("abc"))
    assert not stream.push(end, may_stop=False)
    assert stream.push(end) and stream.stop_text == "<|assistant|>"
    assert stream.take(final=True) == stream.text == "abc"


def test_a_token_that_only_resembles_a_stop_text_ends_nothing() -> None:
    (user,) = tokens_of("<|user|>")
    stream = TextStream(TOKENIZER, ("<|assistant|>",))
    assert not stream.push(user) and not stream.push(tokens_of("a")[0])


def rendered(rendering: Rendering) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if think %} think{% endif %}{% endif %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b"}]
    text: str = tokenizer.decode(encode_text(tokenizer, messages, rendering=rendering))
    return text


@pytest.mark.parametrize(
    ("rendering", "text"),
    [
        (Rendering(), "user: hi<|end|>assistant: a b<|end|>assistant:"),
        (Rendering(variables={"think": True}), "user: hi<|end|>assistant: a b<|end|>assistant: think"),
        (Rendering(opens_answer=False), "user: hi<|end|>assistant: a b<|end|>"),
        (Rendering(opens_answer=False, continues=True), "user: hi<|end|>assistant: a b"),
    ],
)  # fmt: skip
def test_an_answer_begins_after_the_last_message_or_continues_it(rendering: Rendering, text: str) -> None:
    assert rendered(rendering) == text


@pytest.mark.parametrize("name", ["chat_template", "messages", "sanitize_control_tokens", "tokenize", "tools"])
def test_a_variable_of_a_template_is_no_argument_of_its_renderer(name: str) -> None:
    with pytest.raises(RequestError, match=rf"^chat_template_kwargs\.{name}: is no variable"):
        rendered(Rendering(variables={name: False}))


def test_half_a_character_in_a_variable_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mood }}"
    with pytest.raises(RequestError, match="half a character"):
        encode_text(tokenizer, [{"role": "user", "content": "hi"}], rendering=Rendering(variables={"mood": "\ud83d"}))
