"""The message of an answer with calls."""

from __future__ import annotations

import pytest

from engine.server.tools.message import ChatAnswer, delta_of
from engine.text.answer_format import TOOL_FORMATS, AnswerFormat
from engine.text.answer_reader import AnswerReader
from engine.text.tool_grammar import Tool

TOOLS = [Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}})]
CITIES = ("Oslo", "Rome")
TWO = "\n".join(
    '<tool_call>\n{"name": "weather", "arguments": {"city": "' + city + '"}}\n</tool_call>' for city in CITIES
)
HERMES = next(one for one in TOOL_FORMATS if one.name == "hermes")


def answer() -> ChatAnswer:
    format_ = AnswerFormat(HERMES, None, {})
    return ChatAnswer(AnswerReader(format_, TOOLS), format_)


def test_several_calls_have_ids_of_their_own() -> None:
    calls = answer().whole(TWO).calls
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streamed_pieces_of_several_calls_carry_their_numbers(size: int) -> None:
    growing, arguments, ids = answer(), ["", ""], set()
    pieces = [TWO[at : at + size] for at in range(0, len(TWO), size)]
    for deltas in (*map(growing.feed, pieces), growing.end()):
        for call in delta_of(deltas).get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
            ids |= {call["id"]} if "id" in call else set()
    assert arguments == ['{"city": "Oslo"}', '{"city": "Rome"}'] and len(ids) == 2
