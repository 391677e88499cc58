from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from engine.text.answer_format import TOOL_FORMATS, AnswerFormat
from engine.text.answer_reader import AnswerReader
from engine.text.call_text import written
from engine.text.chat import Rendering, render
from engine.text.encode import encode_text
from engine.text.tool_grammar import Tool
from tests.conftest import tiny_tokenizer

TEXTS_ALONE = "{{ tools }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
CALLS = [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "<|end|>", "days": 3}}},
    {"type": "function", "function": {"name": "now", "arguments": {}}},
]
ASKED = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "content": "sunny"},
]
LFM2 = '<|tool_call_start|>[weather(city="<|end|>", days=3), now()]<|tool_call_end|>'


def tokenizer(template: str = TEXTS_ALONE) -> Any:
    made = tiny_tokenizer()
    made.add_tokens([AddedToken(mark, normalized=False) for mark in ("<|tool_call_start|>", "<|tool_call_end|>")])
    made.chat_template = template
    return made


def test_a_format_is_found_by_the_tokenizers_own_marks_where_the_template_names_none() -> None:
    found = AnswerFormat.of(tokenizer()).tools
    assert found is not None and found.name == "lfm2"


def test_a_template_that_shows_texts_alone_gets_calls_as_the_model_wrote_them() -> None:
    text = render(tokenizer(), ASKED, Rendering())
    assert text == f"None<|user|>How is it?<|user|>I look.{LFM2}<|user|>sunny"


def test_what_an_argument_spells_is_text_and_the_marks_of_the_call_are_tokens() -> None:
    made = tokenizer()
    tokens = encode_text(made, ASKED)
    marks = [made.convert_tokens_to_ids(mark) for mark in ("<|tool_call_start|>", "<|tool_call_end|>")]
    assert [tokens.count(mark) for mark in marks] == [1, 1] and made.convert_tokens_to_ids("<|end|>") not in tokens


def test_a_template_that_names_tool_calls_gets_the_messages_as_they_are() -> None:
    template = TEXTS_ALONE + "{{ messages[1].tool_calls | length }}"
    assert render(tokenizer(template), ASKED, Rendering()).endswith("I look.<|user|>sunny2")


@pytest.mark.parametrize("tools", [one for one in TOOL_FORMATS if one.arguments in ("json", "python")], ids=str)
def test_what_is_written_of_calls_is_read_back(tools: Any) -> None:
    format_ = AnswerFormat(tools, None, {})
    reader = AnswerReader(format_, [Tool("weather", {}), Tool("now", {})])
    calls = CALLS[:1] if tools.single else CALLS
    parts = [*reader.feed(written(tools, calls)), *reader.end()]
    assert [part.text for part in parts if part.kind == "call"] == [one["function"]["name"] for one in calls]
    assert [part.text for part in parts if part.kind == "arguments"] == ['{"city": "<|end|>", "days": 3}', "{}"][
        : len(calls)
    ]
