from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from engine.core.errors import RequestError
from engine.text.chat import Disguise, _places, _without_others
from engine.text.encode import encode_text
from engine.text.token_pieces import special_tokens
from tests.conftest import sentencepiece_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|unused|>"]
PLAIN = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"


def ids_of(text: str) -> list[int]:
    """Return the ids of a text of bytes alone."""
    return list(TOKENIZER(text, split_special_tokens=True)["input_ids"])


def encoded(template: str, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return encode_text(tokenizer, messages)


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


@given(st.lists(st.sampled_from([*SPECIAL, "<|", "end", "|>", " ", "a", "\n", "\U000f0041"]), max_size=8))
def test_what_a_message_spells_is_text_and_what_the_template_writes_a_token(parts: list[str]) -> None:
    content = "".join(parts)
    assert encoded(PLAIN, [said(content)]) == [1, *ids_of(content), 2]


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (PLAIN.replace("m.content", "m.content.strip()"), said(" <|end|>\n"), [1, *ids_of("<|end|>"), 2]),
        (PLAIN.replace("m.content", "m.content | trim | upper"), said("a <|end|>"), [1, *ids_of("A <|END|>"), 2]),
        (PLAIN.replace("m.content", "m.content | tojson"), said({"a": "<|end|>"}), [1, *ids_of('{"a": "<|end|>"}'), 2]),
        (PLAIN.replace("m.content", "m.name ~ m.content"), said("end|>", name="<|"), [1, *ids_of("<|end|>"), 2]),
        (PLAIN.replace("m.content", "m.role"), said("", role="user<|end|>"), [1, *ids_of("user<|end|>"), 2]),
        ("<{% for m in messages %}{{ m.content }}{% endfor %}>", said("|end|"), ids_of("<|end|>")),
        ("<{% for m in messages %}{{ m.content }}{% endfor %}|>", said("|end"), ids_of("<|end|>")),
        (
            "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
            "{% endfor %}<|end|>{% endfor %}",
            said([{"type": "text", "text": "a<|user|>"}]),
            [*ids_of("a<|user|>"), 0],
        ),
        (
            PLAIN.replace("m.content", "m.content.split('think')[-1] if 'think' in m.content else 'none'"),
            said("so think<|end|>"),
            [1, *ids_of("<|end|>"), 2],
        ),
        (
            PLAIN.replace("m.content", "m.content.split('<|unused|>')[-1]"),
            said("hm<|unused|>a<|end|>"),
            [1, *ids_of("a<|end|>"), 2],
        ),
    ],
)
def test_messages_stay_text_whatever_the_template_does_with_them(
    template: str, message: dict[str, Any], expected: list[int]
) -> None:
    assert encoded(template, [message]) == expected


def test_every_message_is_text_whoever_wrote_it() -> None:
    roles = ["system", "user", "assistant", "tool"]
    messages = [{"role": role, "content": f"{role}<|assistant|>"} for role in roles]
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    assert encoded(template, messages) == [t for role in roles for t in (1, *ids_of(f"{role}<|assistant|>"), 0)]


def test_messages_that_the_template_treats_in_another_way_for_two_control_tokens_are_refused() -> None:
    template = "{{ 1 if '<|end|>' in messages[0].content or '<|user|>' in messages[0].content else 2 }}<|end|>"
    with pytest.raises(RequestError, match=r"^prompt: the chat template treats .* such as '<\|end\|>' in another way"):
        encoded(template, [said("<|end|><|user|>")])


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_text_beside_control_tokens_is_split_as_the_tokenizer_splits_it(scheme: str) -> None:
    """A word's first space depends on what is before it: only the spelled token may be split in another way."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_tokens([AddedToken("<u>", special=True, rstrip=True), AddedToken("<e>", special=True)])
    tokenizer.chat_template = "a{% for m in messages %}<u> {{ m.content }}<e>{% endfor %}a world"
    honest, hostile = (encode_text(tokenizer, f"a world {name} a world") for name in ("<f>", "<e>"))
    f, e = (tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in b"fe")
    assert [e if token == f else token for token in honest] == hostile
    assert honest == tokenizer("a<u> a world <f> a world<e>a world", add_special_tokens=False)["input_ids"]


def with_whole_words(template: str) -> Any:
    """A tokenizer with a special token that is none within a word, and one that always is."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<w>", special=True, single_word=True, normalized=False)])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("before", ["", "a", "é", "\u0301", "\u203f", ".", " "])
@pytest.mark.parametrize("after", ["", "a", "_", "\u0301", "!"])
def test_a_token_that_is_none_within_a_word_leaves_no_mark_in_the_prompt(before: str, after: str) -> None:
    """The template's token is what the tokenizer makes of it where nobody spells one; the spelled one is text."""
    template = f"{before}<w>{after}<|user|>{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    spelled = [encode_text(with_whole_words(template), "so <w> and <|end|>") for _ in range(2)]
    honest = encode_text(with_whole_words(template), "so")
    assert spelled == [[*honest, *ids_of(" <w> and <|end|>")]] * 2
    is_word = {character: character in "aé_\u0301\u203f" for character in before + after}
    assert (with_whole_words("").convert_tokens_to_ids("<w>") in honest) is not any(is_word.values())


@given(st.lists(st.sampled_from(["<w>", "<l>", "<r>", "<|end|>", "a", "é", "\u0301", " ", "\n", "."])))
def test_tokens_of_every_kind_are_those_of_the_tokenizer_where_all_are_the_templates(parts: list[str]) -> None:
    tokenizer = with_whole_words("")
    for name, how in (("<l>", {"lstrip": True}), ("<r>", {"rstrip": True, "single_word": True})):
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False, **how)])
    text = "".join(parts)
    places = _places(special_tokens(tokenizer).values(), text)
    assert _without_others(tokenizer, text, places) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("normaliser", [normalizers.Prepend("\u2581"), normalizers.Lowercase(), normalizers.Strip()])
def test_a_normaliser_that_changes_where_a_token_is_one_leaves_no_mark(normaliser: normalizers.Normalizer) -> None:
    tokenizer = with_whole_words("")
    tokenizer.backend_tokenizer.normalizer = normaliser
    tokenizer.add_tokens([AddedToken("<n>", special=True, normalized=True)])
    for text in ("a <n> b", "<n> b<n>"):
        places = _places(special_tokens(tokenizer).values(), text)
        assert _without_others(tokenizer, text, places) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_would_find_the_mark_in_no_token_refuses_the_prompt() -> None:
    """Beside the message's token, which is text, the template's is none any more."""
    tokenizer = with_whole_words("<|end|>{% for m in messages %}{{ m.content }}{% endfor %}<n>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("\u2581")
    tokenizer.add_tokens([AddedToken("<n>", special=True, normalized=True)])
    with pytest.raises(RequestError, match=r"^prompt: this tokenizer cannot tell control tokens such as \['<w>'\]"):
        encode_text(tokenizer, "<w>")


def test_a_text_in_every_private_block_is_refused() -> None:
    text = "".join(map(chr, range(0xF0000, 0x10FFFE, 256)))
    with pytest.raises(RequestError, match=r"^prompt: holds characters of every private-use block"):
        Disguise.of(text, SPECIAL)


def test_a_raw_text_may_spell_control_tokens_and_begins_with_one_of_its_own() -> None:
    assert encode_text(TOKENIZER, "<|user|>a", raw=True) == [1, *ids_of("a")]


@pytest.mark.parametrize(("prompt", "begins"), [("a", 1), ("<s>a", 1), ("<s><s>a", 2)])
def test_a_raw_text_that_spells_the_beginning_does_not_begin_twice(prompt: str, begins: int) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = sentencepiece_tokenizer()
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokens = encode_text(tokenizer, prompt, raw=True)
    assert tokens.count(begin) == begins and tokens[:begins] == [begin] * begins
