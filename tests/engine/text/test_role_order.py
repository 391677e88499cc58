"""Conversations whose order of roles a chat template refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.core.errors import RequestError
from engine.text.chat import Rendering
from engine.text.encode import encode_text
from engine.text.role_order import render_accepted
from tests.conftest import tiny_tokenizer
from tests.engine.text.strict_templates import GUARDS

SHOWN = "{% for m in messages %}[{{ m.role }} {{ m.content }}{{ ' calls' if m.tool_calls }}]{% endfor %}"
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
ROLES = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}


def said(texts: str) -> list[dict[str, Any]]:
    """Messages whose texts begin with the first letter of their role; C is a call."""
    return [CALLS if text == "C" else {"role": ROLES[text[0]], "content": text} for text in texts.split()]


def rendered(template: str, messages: list[Any], **options: Any) -> tuple[Any, str]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return render_accepted(tokenizer, messages, Rendering(**options))


def shown(name: str, texts: str) -> str:
    """The prompt of a template that is as strict as the named model's."""
    _, text = rendered(GUARDS[name] + SHOWN, said(texts))
    assert text.startswith("[") and text.endswith("]")
    return text[1:-1]


@pytest.mark.parametrize("name", ["", *GUARDS])
def test_messages_that_the_template_takes_are_rendered_as_they_are(name: str) -> None:
    messages = said("U1 A1 U2")
    taken, text = rendered(GUARDS.get(name, "") + SHOWN, messages)
    assert taken is messages and text == "[user U1][assistant A1][user U2]"


def test_a_template_that_takes_any_order_is_given_it() -> None:
    assert rendered(SHOWN, said("S1 S2 U1 U2 S3"))[1] == "[system S1][system S2][user U1][user U2][system S3]"


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("Qwen 3.5", "S1 S2 U1", "system S1\n\nS2][user U1"),
        ("Qwen 3.5", "S1 U1 S2 C T1", "system S1][user U1][user S2][assistant  calls][tool T1"),
        ("Qwen 3.5", "S1 U1 A1 U2 S2", "system S1][user U1][assistant A1][user U2][user S2"),
        ("Qwen 3.5", "S1 S2 U1 C T1 U2", "system S1\n\nS2][user U1][assistant  calls][tool T1][user U2"),
        ("Mistral", "S1 S2 U1 S3 U2", "system S1\n\nS2][user U1\n\nS3\n\nU2"),
        ("Mistral", "U1 C T1 U2 S1 A1", "user U1][assistant  calls][tool T1\n\nU2\n\nS1][assistant A1"),
        ("Mistral", "U1 A1 C T1 A2 A3", "user U1][assistant A1 calls][tool T1][assistant A2\n\nA3"),
        ("Gemma 3", "S1 U1 U2 A1 S2 U3", "system S1][user U1\n\nU2][assistant A1][user S2\n\nU3"),
        ("Gemma 2", "S1 U1 A1 U2", "user S1\n\nU1][assistant A1][user U2"),
        ("Gemma 2", "S1 S2 U1 A1 S3 U2", "user S1\n\nS2\n\nU1][assistant A1][user S3\n\nU2"),
    ],
)  # fmt: skip
def test_only_what_the_template_refuses_is_changed(name: str, texts: str, expected: str) -> None:
    assert shown(name, texts) == expected


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("Qwen 3.5", "S1 U1 U2 A1 U3 S2 A2 U4 C T1 U5 A3"),
        ("Mistral", "S1 U1 A1 U2 S2 A2 U3 C T1 C T2 U4 A3"),
        ("Gemma 3", "S1 U1 A1 U2 U3 A2 U4"),
        ("Gemma 2", "S1 U1 A1 U2 A2 S2 U3 A3"),
    ],
)
def test_each_turns_prompt_begins_with_the_one_before_it(name: str, texts: str) -> None:
    """A turn ends before an assistant's message, whether the template takes the conversation so far or not."""
    ends = [*(place for place, letter in enumerate(texts) if letter in "AC"), len(texts)]
    prompts = [shown(name, texts[:end]) for end in ends]
    assert [later[: len(earlier)] for earlier, later in pairwise(prompts)] == prompts[:-1]


def test_contents_with_parts_are_joined_part_by_part() -> None:
    picture = {"type": "image"}
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [picture]}]
    (joined,), _ = rendered(GUARDS["Gemma 3"] + SHOWN, messages)
    parts = [{"type": "text", "text": text} for text in ("a", "\n\n")]
    assert joined == {"role": "user", "content": [*parts, picture]} and messages[0]["content"] == "a"


def test_an_empty_message_adds_nothing_to_the_one_it_joins() -> None:
    (joined,), _ = rendered(GUARDS["Gemma 3"] + SHOWN, [*said("U1"), {"role": "user", "content": ""}])
    assert joined["content"] == "U1"


def test_an_answer_that_is_continued_ends_the_prompt_in_another_order_too() -> None:
    options = {"opens_answer": False, "continues": True}
    _, text = rendered(GUARDS["Qwen 3.5"] + SHOWN, said("U1 S1 A1"), **options)
    assert text == "[user U1][user S1][assistant A1"


def test_what_joined_messages_spell_is_text_too() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = GUARDS["Gemma 2"] + SHOWN
    tokens = encode_text(tokenizer, said("S<|end|> U1"))
    assert tokens == tokenizer("[user S<|end|>\n\nU1]", split_special_tokens=True)["input_ids"]


def test_the_first_refusal_is_reported_where_no_order_is_taken() -> None:
    with pytest.raises(RequestError, match=r"^prompt: the chat template refused the messages: 2 of them$"):
        rendered("{{ raise_exception(messages | length ~ ' of them') }}", said("U1 U2"))


def test_a_fault_of_the_template_changes_no_order() -> None:
    with pytest.raises(RequestError, match=r"refused the messages: .list object. has no attribute"):
        rendered("{% if messages[1:] %}{{ messages.a.b }}{% endif %}" + SHOWN, said("U1 U2"))
