"""Every tool format: its grammar takes what the model writes and nothing that a schema forbids, and the reader gets the
call back, however the text is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.text.answer_format import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, ToolFormat
from engine.text.answer_reader import AnswerPart, AnswerReader
from engine.text.tool_grammar import MOST_CALLS, Tool, Wanted, tool_grammar
from tests.conftest import tiny_tokenizer
from tests.grids import pairs

llguidance = pytest.importorskip("llguidance", reason="pip install 'talon-decoding[grammar]'")
from engine.sampling.matcher import Matcher, Matchers  # noqa: E402

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"street": {"type": "string"}, "exact": {"type": "boolean"}}},
    },
    "required": ["city", "days"],
}
TOOLS = (Tool("weather", CITY), Tool("now", {}), Tool("weather_map", {"type": "object", "properties": {}}))
CALLS = [
    ("weather", {"city": 'New "York\n{x}, ü', "unit": "C", "days": 3}),
    ("now", {}),
    ("weather", {"city": "", "days": 9, "tags": ["a", "b,c"], "where": {"exact": True}}),
]
MARKS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>", "<|channel|>", "<|message|>",
    "<|start|>", "<|end|>", "<|constrain|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "[THINK]", "[/THINK]", "<other>",
]  # fmt: skip
FORMATS = pytest.mark.parametrize("tools", TOOL_FORMATS, ids=lambda one: one.name)
HERMES = next(one for one in TOOL_FORMATS if one.name == "hermes")
FORMS = ("plain", "doubled", "indented", "fenced", "compact")  # of calls without their marks
THINK = next(one for one in REASONING_FORMATS if one.begin == "<think>")


@cache
def tokenizer(marked: bool) -> Any:
    """A token is a byte, and, if `marked`, a control text."""
    made = tiny_tokenizer(end="<|eos|>")
    if marked:
        made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    return made


@cache
def matchers(marked: bool) -> Matchers:
    return Matchers(lambda: tokenizer(marked), len(tokenizer(marked)), [0])


def format_of(tools: ToolFormat, marked: bool, reasoning: Any = None) -> AnswerFormat:
    known = tokenizer(marked).added_tokens_decoder
    added = {token.content: number for number, token in known.items()}
    special = frozenset(number for number, token in known.items() if token.special)
    return AnswerFormat(tools, reasoning, added, special)


def matcher(format_: AnswerFormat, wanted: Wanted, marked: bool) -> Matcher:
    from engine.core.grammar import Grammar

    return matchers(marked).begin(Grammar(grammar=tool_grammar(format_, wanted)).validate(), []).result()


def takes(format_: AnswerFormat, wanted: Wanted, text: str, marked: bool = True) -> int | None:
    """None if the text is a whole answer; the place of the character at which it left the grammar, or its length if it
    is one that has to go on.
    """
    state = matcher(format_, wanted, marked)
    ids = tokenizer(marked)(text, add_special_tokens=False)["input_ids"]
    for place, token in enumerate(ids):
        if state.ended or not state.allows(token):
            return len(tokenizer(marked).decode(ids[:place]))
        state.accept(token)
    return None if state.complete else len(text)


def written(tools: ToolFormat, calls: list[tuple[str, Any]]) -> str:
    """What a model writes."""
    return tools.opens + tools.between.join(one(tools, *call) for call in calls) + tools.closes


def one(tools: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    if tools.arguments == "parameters":
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        text = "".join(f"\n<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    elif tools.arguments == "gemma":
        text = gemma(arguments, tools.quote)
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    return tools.begin + name + tools.middle + text + tools.end


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def parts(reader: AnswerReader, pieces: Iterator[str]) -> list[AnswerPart]:
    """With neighbours of one kind as one."""
    found: list[AnswerPart] = []
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.end():
        if found and found[-1].kind == part.kind != "call":
            found[-1] = AnswerPart(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


def calls_of(found: list[AnswerPart]) -> list[tuple[str, Any]]:
    called = [part for part in found if part.kind in ("call", "arguments")]
    return [(name.text, json.loads(text.text)) for name, text in zip(called[::2], called[1::2], strict=True)]


def few(tools: ToolFormat) -> list[tuple[str, Any]]:
    return CALLS[:1] if tools.single else CALLS


TEMPLATES = {  # of families, what their templates have of calls
    "harmony": """{{ "<|start|>assistant to=" }}{{ "functions." + call.name + "<|channel|>commentary " }}""",
    "qwen3-coder": "an <function=...></function> within <tool_call></tool_call> with <parameter=name>",
    "deepseek-v3": r"'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n```json\n'",
    "deepseek": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments",
    "mistral-args": '"[TOOL_CALLS]" + call.function.name + "[ARGS]" + arguments',
    "mistral-v3": '"[TOOL_CALLS] [" + calls + "]"',
    "mistral": '"[TOOL_CALLS][" + calls + "]"',
    "gemma4": "'<|tool_call>call:' + name + '{'",
    "gemma": "'<start_function_call>call:' + name + '{'",
    "granite": "respond only with <|tool_call|> followed by a JSON list of tools used",
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    "llama": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
}
UNKNOWN = [  # GLM's, a list between marks, Mistral Small's with ids, and one without tools
    "<tool_call>{{ call.name }}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value></tool_call>",
    "<tool_calls>[{}]</tool_calls> within a <tool_call>",
    "'[TOOL_CALLS]' + call.name + '[CALL_ID]' + call.id + '[ARGS]' + arguments",
    "{{ message.content }}",
]


def found(template: str) -> ToolFormat | None:
    made = tiny_tokenizer()
    made.chat_template = "{% if tools %}" + template
    return AnswerFormat.of(made).tools


@FORMATS
def test_a_format_is_found_by_what_templates_of_its_family_contain(tools: ToolFormat) -> None:
    assert found(TEMPLATES[tools.name]) is tools


@pytest.mark.parametrize("template", UNKNOWN)
def test_a_format_that_only_looks_like_a_known_one_is_none(template: str) -> None:
    assert found(template) is None


@FORMATS
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("calls", ["required", "auto"])
def test_what_a_model_writes_is_in_the_grammar(tools: ToolFormat, marked: bool, calls: str) -> None:
    text = written(tools, few(tools))
    assert takes(format_of(tools, marked), Wanted(TOOLS, calls), text, marked) is None


@FORMATS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_come_back_however_the_text_is_cut(tools: ToolFormat, size: int) -> None:
    text = written(tools, few(tools))
    reader = AnswerReader(format_of(tools, True), TOOLS)
    assert calls_of(parts(reader, (text[at : at + size] for at in range(0, len(text), size)))) == few(tools)


@pairs(
    tools=TOOL_FORMATS,
    call=[
        ("nothing", {}),
        ("weather", {}),
        ("weather", {"city": "x"}),
        ("weather", {"city": "x", "days": 10}),
        ("weather", {"city": "x", "days": 1.5}),
        ("weather", {"city": "x", "unit": "K", "days": 3}),
        ("weather", {"city": "x", "days": 3, "more": 1}),
        ("weather", {"city": "x", "days": 3, "tags": [1]}),
        ("now", {"city": "x"}),
    ],
    calls=["required", "auto"],
)
def test_what_a_schema_forbids_cannot_be_called(tools: ToolFormat, call: tuple[str, Any], calls: str) -> None:
    if (tools.arguments, call[1].get("tags")) == ("parameters", [1]):
        pytest.skip("the list is JSON there, and the test of JSON formats holds for it")
    text = written(tools, [call])
    assert takes(format_of(tools, True), Wanted(TOOLS, calls), text) is not None


@FORMATS
def test_text_may_come_before_a_call_that_the_model_chooses_to_make(tools: ToolFormat) -> None:
    if tools.leading or tools.skipped:
        pytest.skip("calls begin the answer, or have headers before them")
    text = "Let me see: {[(< \n" + written(tools, CALLS[:2])
    assert takes(format_of(tools, True), Wanted(TOOLS, "auto"), text) is None
    found = parts(AnswerReader(format_of(tools, True), TOOLS), iter(text))
    assert found[0] == AnswerPart("content", "Let me see: {[(<") and calls_of(found) == CALLS[:2]
    assert takes(format_of(tools, True), Wanted(TOOLS, "required"), text) == 0


@FORMATS
@pytest.mark.parametrize("lead", ["\n", " \r\n", "<other>\n", "<other><other>", "\n<other> \n<other>\t"])
def test_hidden_control_tokens_and_blanks_before_a_call_hide_no_call(tools: ToolFormat, lead: str) -> None:
    """Models begin so after earlier calls."""
    format_, wrong = format_of(tools, True), written(tools, [("weather", {"city": "x", "days": 10})])
    bare_calls = [bare("weather", {"city": "x", "days": 9}, form) for form in FORMS] if tools.bare else []
    for text in [written(tools, few(tools)), *bare_calls]:
        assert takes(format_, Wanted(TOOLS, "auto"), lead + text) is None
        shown = (lead + text).replace("<other>", "")
        for size in (1, 4, 1000):
            found = parts(AnswerReader(format_, TOOLS), (shown[at : at + size] for at in range(0, len(shown), size)))
            assert {part.kind for part in found} == {"call", "arguments"} and calls_of(found)[0][0] == "weather"
    for text in [wrong, *(call.replace("9", "10") for call in bare_calls)]:
        assert takes(format_, Wanted(TOOLS, "auto"), lead + text) not in (None, len(lead + text))


@FORMATS
@pytest.mark.parametrize("lead", ["\n", "<other>\n", "\n<other><other>"])
def test_an_answer_that_begins_so_may_call_nothing(tools: ToolFormat, lead: str) -> None:
    text = lead + "Say it."
    assert takes(format_of(tools, True), Wanted(TOOLS, "auto"), text) is None
    shown = text.replace("<other>", "")
    assert parts(AnswerReader(format_of(tools, True), TOOLS), iter(shown)) == [AnswerPart("content", shown)]


@pytest.mark.parametrize("before", ["<other>", "So<other> "])
@pytest.mark.parametrize(("days", "fits"), [(9, True), (10, False)])
def test_a_spelled_mark_after_a_control_token_begins_a_call_too(before: str, days: int, fits: bool) -> None:
    rest = written(HERMES, [("weather", {"city": "x", "days": days})]).removeprefix(HERMES.trigger)
    texts = ((True, before), (False, HERMES.trigger), (True, rest))
    ids = [token for marked, text in texts for token in tokenizer(marked)(text)["input_ids"]]
    state = matcher(format_of(HERMES, True), Wanted(TOOLS, "auto"), True)
    assert all(state.allows(token) and state.accept(token) is None for token in ids) == fits


@pytest.mark.parametrize("before", ["So ", "\nSo\n", ". "])
def test_a_call_that_has_to_lead_is_text_behind_other_text(before: str) -> None:
    llama = next(one for one in TOOL_FORMATS if one.leading)
    text = before + written(llama, CALLS[1:2])
    assert takes(format_of(llama, True), Wanted(TOOLS, "auto"), text) is None
    for size in (1, 5, 1000):
        pieces = (text[at : at + size] for at in range(0, len(text), size))
        assert parts(AnswerReader(format_of(llama, True), TOOLS), pieces) == [AnswerPart("content", text)]


@FORMATS
def test_an_answer_without_calls_is_any_text_where_it_may_call(tools: ToolFormat) -> None:
    text = " Say <tool or [TOOL or call: {}\n\n"
    assert takes(format_of(tools, True), Wanted(TOOLS, "auto"), text) is None
    found = parts(AnswerReader(format_of(tools, True), TOOLS), iter(text))
    assert found == [AnswerPart("content", text)]
    assert takes(format_of(tools, True), Wanted(TOOLS, "required"), text) is not None


@FORMATS
def test_one_call_ends_the_answer_where_there_may_be_no_more(tools: ToolFormat) -> None:
    state = matcher(format_of(tools, True), Wanted(TOOLS, "required", many=False), True)
    for token in tokenizer(True)(written(tools, CALLS[:1]), add_special_tokens=False)["input_ids"]:
        assert not state.ended
        state.accept(token)
    assert state.ended


def test_an_answer_has_a_bounded_number_of_calls() -> None:
    most, over = (written(HERMES, CALLS[1:2] * count) for count in (MOST_CALLS, MOST_CALLS + 1))
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), most) is None
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), over) == len(most) + 1  # the blank that may end it


@FORMATS
def test_all_but_names_and_values_of_a_call_is_foreseen(tools: ToolFormat) -> None:
    """Foreseen tokens are drafted at no cost."""
    if tools.skipped:
        pytest.skip("headers may come before the call")
    state = matcher(format_of(tools, True), Wanted(TOOLS[1:2], "required", many=False), True)
    ids = tokenizer(True)(written(tools, [("now", {})]), add_special_tokens=False)["input_ids"]
    place = 0
    while place < len(ids):
        forced = state.foreseen()
        assert forced and forced == ids[place : place + len(forced)]
        for token in forced:
            state.accept(token)
        place += len(forced)


@pytest.mark.parametrize("marked", [True, False])
def test_reasoning_is_apart_and_what_it_says_of_calls_is_no_call(marked: bool) -> None:
    format_, call = format_of(HERMES, marked, THINK), written(HERMES, CALLS[:1])
    thought = "I write <tool_call> and then\n"
    for text, thinking in ((f"<think>{thought}</think>\n\n{call}", False), (f"{thought}</think>\n\n{call}", True)):
        if thinking or marked:
            assert takes(format_, Wanted(TOOLS, "required", thinking=thinking), text, marked) is None
            assert takes(format_, Wanted(TOOLS, "auto", thinking=thinking), text, marked) is None
        found = parts(AnswerReader(format_, TOOLS, thinking), iter(text))
        assert found[0] == AnswerPart("reasoning", thought) and calls_of(found) == CALLS[:1]


def test_text_after_reasoning_begins_without_blanks() -> None:
    format_ = format_of(TOOL_FORMATS[0], True, THINK)
    assert parts(AnswerReader(format_), iter("<think>a\n</think>\n\n b \n")) == [
        AnswerPart("reasoning", "a\n"),
        AnswerPart("content", "b \n"),
    ]


def test_answers_follow_a_schema_or_call_where_both_are_asked_for() -> None:
    wanted = Wanted(TOOLS, "auto", answer={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert takes(format_of(HERMES, True), wanted, '{"a": 1}') is None
    assert takes(format_of(HERMES, True), wanted, written(HERMES, CALLS)) is None
    assert takes(format_of(HERMES, True), wanted, "a") == 0


def test_harmonys_channels_are_its_parts() -> None:
    harmony, reasoning = TOOL_FORMATS[0], REASONING_FORMATS[0]
    format_ = format_of(harmony, True, reasoning)
    begins = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = begins + "<|channel|>final<|message|>Yes: {}"
    call = begins + written(harmony, CALLS[:1])
    for text in (
        final,
        call,
        begins + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call[len(begins) :],
    ):
        assert takes(format_, Wanted(TOOLS, "auto"), text) is None
    assert takes(format_, Wanted(TOOLS, "required"), call) is None
    assert parts(AnswerReader(format_, TOOLS), iter(final)) == [
        AnswerPart("reasoning", "Hm."),
        AnswerPart("content", "Yes: {}"),
    ]
    assert calls_of(parts(AnswerReader(format_, TOOLS), iter(call))) == CALLS[:1]


@pytest.mark.parametrize("written_type", ["<|constrain|>json", "json"])
@pytest.mark.parametrize(
    "before",
    [
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant",
    ],
)
def test_harmony_may_name_the_tool_as_whom_a_message_is_to(before: str, written_type: str) -> None:
    format_ = format_of(TOOL_FORMATS[0], True, REASONING_FORMATS[0])
    arguments = json.dumps(CALLS[0][1], ensure_ascii=False)
    text = f"{before} to=functions.weather<|channel|>commentary {written_type}<|message|>{arguments}"
    assert takes(format_, Wanted(TOOLS, "auto"), text) is None
    assert takes(format_, Wanted(TOOLS, "auto"), text.replace('"days": 3', '"days": 10')) is not None
    assert takes(format_, Wanted(TOOLS, "auto"), text.replace("weather", "nothing", 1)) is not None
    if "I look." not in before:
        assert takes(format_, Wanted(TOOLS, "required"), text) is None
    for size in (1, 5, 1000):
        found = parts(AnswerReader(format_, TOOLS), (text[at : at + size] for at in range(0, len(text), size)))
        assert calls_of(found) == CALLS[:1]
        assert [part.text for part in found if part.kind == "content"] == ["I look."] * ("I look." in before)


@pytest.mark.parametrize("lead", ["\n", "<other>\n\n", "\n<other>"])
def test_a_message_to_a_tool_may_begin_so_too(lead: str) -> None:
    format_ = format_of(TOOL_FORMATS[0], True, REASONING_FORMATS[0])
    text = f"{lead} to=functions.now<|channel|>commentary json<|message|>{{}}"
    assert takes(format_, Wanted(TOOLS, "auto"), text) is None
    assert takes(format_, Wanted(TOOLS, "auto"), text.replace("now", "nothing")) is not None
    shown = text.replace("<other>", "")
    for size in (1, 5, 1000):
        pieces = (shown[at : at + size] for at in range(0, len(shown), size))
        assert calls_of(parts(AnswerReader(format_, TOOLS), pieces)) == [("now", {})]


@pytest.mark.parametrize("text", [" to=", " to=functions", " to=function calls.", "Ask to=functions.now"])
def test_a_text_that_only_looks_like_such_a_header_is_text(text: str) -> None:
    format_ = format_of(TOOL_FORMATS[0], True, REASONING_FORMATS[0])
    for before in ("", "<|channel|>final<|message|>"):
        assert takes(format_, Wanted(TOOLS, "auto"), before + text) is None
        assert parts(AnswerReader(format_, TOOLS), iter(before + text)) == [AnswerPart("content", text)]
    after = "<|channel|>final<|message|> to=functions.now"
    assert parts(AnswerReader(format_, TOOLS), iter(after)) == [AnswerPart("content", " to=functions.now")]
    assert takes(format_, Wanted(TOOLS, "auto"), after) is None
    assert takes(format_, Wanted(TOOLS, "required"), after) is not None


def test_a_call_that_is_cut_off_is_as_far_as_it_came() -> None:
    text = written(HERMES, CALLS[:1])
    found = parts(AnswerReader(format_of(HERMES, True), TOOLS), iter(text[: text.index("York")]))
    assert found == [AnswerPart("call", "weather"), AnswerPart("arguments", '{"city": "New \\"')]
    assert parts(AnswerReader(format_of(HERMES, True), TOOLS), iter("<tool_call>\n")) == []


BARE = pytest.mark.parametrize("form", FORMS)


def bare(name: str, arguments: Any, form: str) -> str:
    indent = 2 if form in ("indented", "fenced") else None
    marks = (",", ":") if form == "compact" else None
    call = json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=False, separators=marks)
    return {"doubled": "{" + call + "}", "fenced": f"```json\n{call}\n```"}.get(form, call)


@BARE
def test_a_call_that_a_model_writes_without_its_marks_is_one_where_the_answer_begins_with_it(form: str) -> None:
    text = "\n".join(bare(*call, form) for call in CALLS)
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), text) is None
    for size in (1, 5, 1000):
        pieces = (text[at : at + size] for at in range(0, len(text), size))
        assert calls_of(parts(AnswerReader(format_of(HERMES, True), TOOLS), pieces)) == CALLS
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), "So: " + text) is None
    assert parts(AnswerReader(format_of(HERMES, True), TOOLS), iter("So: " + text)) == [
        AnswerPart("content", "So: " + text)
    ]
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto", many=False), text) is not None


@pytest.mark.parametrize("form", ["plain", "indented"])
def test_a_fence_may_hold_several_calls(form: str) -> None:
    text = "```json\n" + "\n".join(bare(*call, form) for call in CALLS) + "\n```"
    for behind in ("", "\n\n" + bare(*CALLS[0], "fenced"))[: 1 + (form == "indented")]:
        assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), text + behind) is None
        for size in (1, 5, 1000):
            pieces = ((text + behind)[at : at + size] for at in range(0, len(text + behind), size))
            found = calls_of(parts(AnswerReader(format_of(HERMES, True), TOOLS), pieces))
            assert found == CALLS + (CALLS[:1] if behind else [])


@BARE
@pytest.mark.parametrize("arguments", [{}, {"city": 1, "days": 1}, {"city": "x", "days": 10}])
def test_such_a_call_follows_the_schema_too(form: str, arguments: Any) -> None:
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), bare("weather", arguments, form)) is not None


@pytest.mark.parametrize("marked", [True, False])
def test_a_spelled_mark_begins_a_call_that_follows_the_schema(marked: bool) -> None:
    text = "I say " + written(HERMES, [("weather", {"city": "x", "days": 10})])
    assert takes(format_of(HERMES, marked), Wanted(TOOLS, "auto"), text, marked) == text.index("10") + 1


@pytest.mark.parametrize(
    "text", ['{"name": "weather"', '{"name": "nothing", "arguments": {}}', "```json\n{}\n```", "{", "``"]
)
def test_json_that_is_no_call_is_text(text: str) -> None:
    assert takes(format_of(HERMES, True), Wanted(TOOLS, "auto"), text) is None
    assert parts(AnswerReader(format_of(HERMES, True), TOOLS), iter(text)) == [AnswerPart("content", text)]


@pytest.mark.parametrize("text", ["\n", '\n{"temperature":', "\n\nIt is warm.", '\n{"name": "anyth'])
@pytest.mark.parametrize("marked", [True, False])
def test_a_line_after_a_call_forces_no_other_call(marked: bool, text: str) -> None:
    """Small models go on with what they think that the call brings."""
    forms = [bare(*CALLS[0], form) for form in FORMS]
    for call in (*forms, written(HERMES, CALLS[:1])):
        assert takes(format_of(HERMES, marked), Wanted(TOOLS, "auto"), call + text, marked) is None
        assert calls_of(parts(AnswerReader(format_of(HERMES, marked), TOOLS), iter(call + text))) == CALLS[:1]
    assert takes(format_of(HERMES, marked), Wanted(TOOLS, "auto"), call + text * 20, marked) is not None


@FORMATS
def test_an_answer_may_end_with_a_blank_after_its_calls(tools: ToolFormat) -> None:
    """Else a line's end would force another call."""
    if tools.single:
        pytest.skip("an answer has one call")
    text = written(tools, CALLS[:2]) + "\n"
    assert takes(format_of(tools, True), Wanted(TOOLS, "required"), text) is None
    assert calls_of(parts(AnswerReader(format_of(tools, True), TOOLS), iter(text))) == CALLS[:2]
