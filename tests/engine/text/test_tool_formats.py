"""Every tool format: its grammar takes what the model writes and nothing that a schema forbids, and the reader gets the
call back, however the text is cut.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.text.answer_format import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, ToolFormat
from engine.text.answer_reader import AnswerPart, AnswerReader
from engine.text.call_arguments import gemma_name
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
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|tools_prefix|>", "<|tools_suffix|>", "<seed:tool_call>", "</seed:tool_call>",
]  # fmt: skip
FORMATS = pytest.mark.parametrize("tools", TOOL_FORMATS, ids=lambda one: one.name)
HERMES = next(one for one in TOOL_FORMATS if one.name == "hermes")
HIDDEN = "<other>"  # a control text that an answer does not show
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
        opens, middle, closes = tools.parameter
        text = "".join(opens + key + middle + value + closes for key, value in values.items())
    elif tools.arguments == "python":
        text = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    elif tools.arguments == "gemma":
        text = gemma(arguments, tools.quote)
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    return tools.begin + name + tools.middle + text + tools.end


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{gemma_name(key)}:{gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


AUTO, REQUIRED = Wanted(TOOLS, "auto"), Wanted(TOOLS, "required")


def read(format_: AnswerFormat, text: str, thinking: bool = False, tools: Sequence[Tool] = TOOLS) -> list[AnswerPart]:
    """Return the parts of a text, which are the same however it is cut, with neighbours of one kind as one."""

    def parts(size: int) -> list[AnswerPart]:
        reader, found = AnswerReader(format_, tools, thinking), list[AnswerPart]()
        pieces = (text[at : at + size] for at in range(0, len(text), size))
        for part in [part for piece in pieces for part in reader.feed(piece)] + reader.end():
            if found and found[-1].kind == part.kind != "call":
                found[-1] = AnswerPart(part.kind, found[-1].text + part.text)
            else:
                found.append(part)
        return found

    whole = parts(1000)
    for size in (1, 3, 7):
        assert parts(size) == whole, size
    return whole


def calls_of(found: list[AnswerPart]) -> list[tuple[str, Any]]:
    called = [part for part in found if part.kind in ("call", "arguments")]
    return [(name.text, json.loads(text.text)) for name, text in zip(called[::2], called[1::2], strict=True)]


def check_called(format_: AnswerFormat, text: str, calls: list[tuple[str, Any]], wanted: Wanted = AUTO) -> None:
    """Look that the grammar takes a text, control texts and all, and that the reader finds these calls in what of it is
    shown.
    """
    assert takes(format_, wanted, text) is None
    found = read(format_, text.replace(HIDDEN, ""))
    assert calls_of(found) == calls and found[-1].kind == "arguments"


def check_text(format_: AnswerFormat, text: str) -> None:
    """Look that a text may be an answer, and calls nothing."""
    assert takes(format_, AUTO, text) is None
    shown = text.replace(HIDDEN, "")
    assert read(format_, shown) == [AnswerPart("content", shown)]


def few(tools: ToolFormat) -> list[tuple[str, Any]]:
    return CALLS[:1] if tools.single else CALLS


TEMPLATES = {  # of families, what their templates have of calls
    "harmony": """{{ "<|start|>assistant to=" }}{{ "functions." + call.name + "<|channel|>commentary " }}""",
    "qwen3-coder": "an <function=...></function> within <tool_call></tool_call> with <parameter=name>",
    "seed-oss": "<seed:tool_call>\n<function=NAME>\n<parameter=NAME>value</parameter>\n</function>\n</seed:tool_call>",
    "glm-compact": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "toolcall": """'<TOOLCALL>[' + '{"name": "' + fn.name + '", "arguments": '""",
    "apertus": """'<|tools_prefix|>' + '[' + '{"' + function.name + '": ' + function.arguments""",
    "lfm2": '"<|tool_call_start|>[" + (tool_calls | join(", ")) + "]<|tool_call_end|>"',
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
UNKNOWN = [  # MiniMax's, a list between marks, Mistral Small's with ids, and one without tools
    '<minimax:tool_call><invoke name="{{ call.name }}"><parameter name="{{ key }}">',
    "<tool_calls>[{}]</tool_calls> within a <tool_call>",
    "'[TOOL_CALLS]' + call.name + '[CALL_ID]' + call.id + '[ARGS]' + arguments",
    "{{ message.content }}",
]


def test_a_format_is_found_by_what_templates_of_its_family_contain_and_no_other_is() -> None:
    def found(template: str) -> ToolFormat | None:
        made = tiny_tokenizer()
        made.chat_template = "{% if tools %}" + template
        return AnswerFormat.of(made).tools

    for tools in TOOL_FORMATS:
        assert found(TEMPLATES[tools.name]) is tools
    assert [found(template) for template in UNKNOWN] == [None] * len(UNKNOWN)


@FORMATS
@pytest.mark.parametrize("marked", [True, False])
def test_what_a_model_writes_is_in_the_grammar_and_is_read_back(tools: ToolFormat, marked: bool) -> None:
    text = written(tools, few(tools))
    for wanted in (AUTO, REQUIRED):
        assert takes(format_of(tools, marked), wanted, text, marked) is None
    assert calls_of(read(format_of(tools, marked), text)) == few(tools)
    if not tools.single:  # an answer may end with a blank, else a line's end would force another call
        check_called(format_of(tools, True), written(tools, CALLS[:2]) + "\n", CALLS[:2], REQUIRED)


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
    format_, text = format_of(tools, True), "Let me see: {[(< \n" + written(tools, CALLS[:2])
    check_called(format_, text, CALLS[:2])
    assert read(format_, text)[0] == AnswerPart("content", "Let me see: {[(<")
    assert takes(format_, REQUIRED, text) == 0


@FORMATS
@pytest.mark.parametrize("lead", ["\n", " \r\n", "<other>\n", "<other><other>", "\n<other> \n<other>\t"])
def test_hidden_control_tokens_and_blanks_before_an_answer_hide_no_call(tools: ToolFormat, lead: str) -> None:
    """Models begin so after earlier calls."""
    format_, wrong = format_of(tools, True), written(tools, [("weather", {"city": "x", "days": 10})])
    call = ("weather", {"city": "x", "days": 9})
    bare_calls = [bare(*call, form) for form in FORMS] if tools.bare else []
    for text, calls in [(written(tools, few(tools)), few(tools)), *((one, [call]) for one in bare_calls)]:
        check_called(format_, lead + text, calls)
        assert read(format_, (lead + text).replace(HIDDEN, ""))[0].kind == "call"
    for text in [wrong, *(call.replace("9", "10") for call in bare_calls)]:
        assert takes(format_, AUTO, lead + text) not in (None, len(lead + text))
    check_text(format_, lead + "Say it.")


@pytest.mark.parametrize("before", ["<other>", "So<other> "])
@pytest.mark.parametrize(("days", "fits"), [(9, True), (10, False)])
def test_a_spelled_mark_after_a_control_token_begins_a_call_too(before: str, days: int, fits: bool) -> None:
    rest = written(HERMES, [("weather", {"city": "x", "days": days})]).removeprefix(HERMES.trigger)
    texts = ((True, before), (False, HERMES.trigger), (True, rest))
    ids = [token for marked, text in texts for token in tokenizer(marked)(text)["input_ids"]]
    state = matcher(format_of(HERMES, True), AUTO, True)
    assert all(state.allows(token) and state.accept(token) is None for token in ids) == fits


@pytest.mark.parametrize("before", ["So ", "\nSo\n", ". "])
def test_a_call_that_has_to_lead_is_text_behind_other_text(before: str) -> None:
    llama = next(one for one in TOOL_FORMATS if one.leading)
    check_text(format_of(llama, True), before + written(llama, CALLS[1:2]))


@FORMATS
def test_an_answer_without_calls_is_any_text_where_it_may_call(tools: ToolFormat) -> None:
    text = " Say <tool or [TOOL or call: {}\n\n"
    check_text(format_of(tools, True), text)
    assert takes(format_of(tools, True), REQUIRED, text) is not None


@FORMATS
def test_one_call_ends_the_answer_where_there_may_be_no_more(tools: ToolFormat) -> None:
    state = matcher(format_of(tools, True), Wanted(TOOLS, "required", many=False), True)
    for token in tokenizer(True)(written(tools, CALLS[:1]), add_special_tokens=False)["input_ids"]:
        assert not state.ended
        state.accept(token)
    assert state.ended


@FORMATS
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": r"^[A-Z]{2}/\d+$"}, "AB/12", ["AB/", "ab/1", "AB/1x", "AB/\u0663", " AB/1"]),
        ({"pattern": "b.\\$", "maxLength": 5}, "a\nbc$", ["a\nb$", "aaabc$"]),
        ({"pattern": "^a|b$"}, "a", ["c"]),
        ({"format": "date"}, "2026-02-28", ["2026-13-01", "2026-2-8"]),
        ({"format": "time"}, "23:59:01Z", ["24:00:00Z", "23:59"]),
        ({"format": "date-time"}, "2026-02-28T00:00:00.5+01:00", ["2026-02-28"]),
        ({"format": "email"}, "a.b+c@d-e.org", ["a@", "a b@c.d"]),
        ({"format": "ipv4"}, "192.168.0.255", ["192.168.0.256", "1.2.3"]),
        ({"format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", ["123e4567"]),
    ],
    ids=str,
)
def test_a_text_has_the_pattern_and_the_format_that_its_schema_names(
    tools: ToolFormat, schema: dict[str, Any], good: str, bad: list[str]
) -> None:
    named = {"type": "object", "properties": {"text": {"type": "string"} | schema}, "required": ["text"]}
    wanted, format_ = Wanted([Tool("find", named)], "required", many=False), format_of(tools, True)
    for text in [good, *bad]:
        found = takes(format_, wanted, written(tools, [("find", {"text": text})]))
        assert (found is None) == (text == good), text


def test_an_answer_has_a_bounded_number_of_calls() -> None:
    most, over = (written(HERMES, CALLS[1:2] * count) for count in (MOST_CALLS, MOST_CALLS + 1))
    assert takes(format_of(HERMES, True), AUTO, most) is None
    assert takes(format_of(HERMES, True), AUTO, over) == len(most) + 1  # the blank that may end it


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
            for calls in ("required", "auto"):
                assert takes(format_, Wanted(TOOLS, calls, thinking=thinking), text, marked) is None
        found = read(format_, text, thinking)
        assert found[0] == AnswerPart("reasoning", thought) and calls_of(found) == CALLS[:1]
    text = "<think>a\n</think>\n\n b \n"
    assert read(format_, text) == [AnswerPart("reasoning", "a\n"), AnswerPart("content", "b \n")]


@pytest.mark.parametrize("reasoning", REASONING_FORMATS, ids=lambda one: one.begin)
def test_every_format_of_reasoning_is_found_in_its_template_and_read(reasoning: Any) -> None:
    made = tiny_tokenizer()
    made.chat_template = "{{ " + "".join(map(repr, reasoning.marks)) + " }}"
    format_ = AnswerFormat.of(made)
    assert format_.reasoning is reasoning
    found = read(format_, f"{reasoning.begin}Hm.{reasoning.end}Yes.")
    assert found == [AnswerPart("reasoning", "Hm."), AnswerPart("content", "Yes.")]


def test_answers_follow_a_schema_or_call_where_both_are_asked_for() -> None:
    wanted = Wanted(TOOLS, "auto", answer={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert takes(format_of(HERMES, True), wanted, '{"a": 1}') is None
    assert takes(format_of(HERMES, True), wanted, written(HERMES, CALLS)) is None
    assert takes(format_of(HERMES, True), wanted, "a") == 0


HARMONY = TOOL_FORMATS[0]
THINKS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
LOOKS = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


def harmony() -> AnswerFormat:
    return format_of(HARMONY, True, REASONING_FORMATS[0])


def test_harmonys_channels_are_its_parts() -> None:
    call, final = written(HARMONY, CALLS[:1]), f"{THINKS}<|channel|>final<|message|>Yes: {{}}"
    check_called(harmony(), THINKS + call, CALLS[:1], REQUIRED)
    check_called(harmony(), THINKS + LOOKS + call, CALLS[:1])
    assert takes(harmony(), AUTO, final) is None
    assert read(harmony(), final) == [AnswerPart("reasoning", "Hm."), AnswerPart("content", "Yes: {}")]


@pytest.mark.parametrize("written_type", ["<|constrain|>json", "json"])
@pytest.mark.parametrize("before", ["", THINKS, THINKS + LOOKS, "\n", "<other>\n\n", "\n<other>"])
def test_harmony_may_name_the_tool_as_whom_a_message_is_to(before: str, written_type: str) -> None:
    arguments = json.dumps(CALLS[0][1], ensure_ascii=False)
    text = f"{before} to=functions.weather<|channel|>commentary {written_type}<|message|>{arguments}"
    check_called(harmony(), text, CALLS[:1])
    assert takes(harmony(), AUTO, text.replace('"days": 3', '"days": 10')) is not None
    assert takes(harmony(), AUTO, text.replace("weather", "nothing", 1)) is not None
    if before in ("", THINKS):
        assert takes(harmony(), REQUIRED, text) is None
    shown = [part.text for part in read(harmony(), text.replace(HIDDEN, "")) if part.kind == "content"]
    assert shown == ["I look."] * before.endswith(LOOKS)


@pytest.mark.parametrize("text", [" to=", " to=functions", " to=function calls.", "Ask to=functions.now"])
def test_a_text_that_only_looks_like_such_a_header_is_text(text: str) -> None:
    check_text(harmony(), text)
    for said in (text, " to=functions.now"):
        final = f"<|channel|>final<|message|>{said}"
        assert takes(harmony(), AUTO, final) is None and takes(harmony(), REQUIRED, final) is not None
        assert read(harmony(), final) == [AnswerPart("content", said)]


def test_a_call_that_is_cut_off_is_as_far_as_it_came() -> None:
    text = written(HERMES, CALLS[:1])
    found = read(format_of(HERMES, True), text[: text.index("York")])
    assert found == [AnswerPart("call", "weather"), AnswerPart("arguments", '{"city": "New \\"')]
    assert read(format_of(HERMES, True), "<tool_call>\n") == []


def bare(name: str, arguments: Any, form: str) -> str:
    """A call that a model writes without its marks."""
    indent = 2 if form in ("indented", "fenced") else None
    marks = (",", ":") if form == "compact" else None
    call = json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=False, separators=marks)
    return {"doubled": "{" + call + "}", "fenced": f"```json\n{call}\n```"}.get(form, call)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_without_its_marks_is_one_where_the_answer_begins_with_it(form: str) -> None:
    format_, text = format_of(HERMES, True), "\n".join(bare(*call, form) for call in CALLS)
    check_called(format_, text, CALLS)
    check_text(format_, "So: " + text)
    assert takes(format_, Wanted(TOOLS, "auto", many=False), text) is not None
    for wrong in ({}, {"city": 1, "days": 1}, {"city": "x", "days": 10}):
        assert takes(format_, AUTO, bare("weather", wrong, form)) is not None


def test_a_fence_may_hold_several_calls() -> None:
    fences = ["```json\n" + "\n".join(bare(*call, form) for call in CALLS) + "\n```" for form in ("plain", "indented")]
    for text in fences:
        check_called(format_of(HERMES, True), text, CALLS)
    check_called(format_of(HERMES, True), fences[1] + "\n\n" + bare(*CALLS[0], "fenced"), [*CALLS, CALLS[0]])


@pytest.mark.parametrize("marked", [True, False])
def test_a_spelled_mark_begins_a_call_that_follows_the_schema(marked: bool) -> None:
    text = "I say " + written(HERMES, [("weather", {"city": "x", "days": 10})])
    assert takes(format_of(HERMES, marked), AUTO, text, marked) == text.index("10") + 1


@pytest.mark.parametrize(
    "text", ['{"name": "weather"', '{"name": "nothing", "arguments": {}}', "```json\n{}\n```", "{", "``"]
)
def test_json_that_is_no_call_is_text(text: str) -> None:
    check_text(format_of(HERMES, True), text)


@pytest.mark.parametrize("text", ["\n", '\n{"temperature":', "\n\nIt is warm.", '\n{"name": "anyth'])
@pytest.mark.parametrize("marked", [True, False])
def test_a_line_after_a_call_forces_no_other_call(marked: bool, text: str) -> None:
    """Small models go on with what they think that the call brings."""
    format_ = format_of(HERMES, marked)
    for call in (*(bare(*CALLS[0], form) for form in FORMS), written(HERMES, CALLS[:1])):
        assert takes(format_, AUTO, call + text, marked) is None
        assert calls_of(read(format_, call + text)) == CALLS[:1]
    assert takes(format_, AUTO, call + text * 20, marked) is not None


PYTHON = next(one for one in TOOL_FORMATS if one.arguments == "python")
SET = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "flag": {"type": "boolean"},
        "gone": {"type": ["string", "null"]},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("text='it\\'s (a, \"b\")'", {"text": 'it\'s (a, "b")'}),
        ('text="it\'s, )"', {"text": "it's, )"}),
        ("flag=True", {"flag": True}),
        ("flag=false", {"flag": False}),
        ("gone=None", {"gone": None}),
        ("gone=null", {"gone": None}),
        ("unit='C'", {"unit": "C"}),
        ('text="", flag=True, tags=["a", "b)"]', {"text": "", "flag": True, "tags": ["a", "b)"]}),
    ],
)
def test_values_may_be_written_as_python_or_json_writes_them(text: str, value: Any) -> None:
    format_, answer = format_of(PYTHON, True), f"{PYTHON.opens}set({text}){PYTHON.closes}"
    assert takes(format_, Wanted([Tool("set", SET)], "required"), answer) is None
    assert calls_of(read(format_, answer)) == [("set", value)]


@pytest.mark.parametrize("text", ["unit='K'", "flag=None", "flag='x'", "tags=[1]", "text=1"])
def test_what_a_schema_forbids_is_no_value_in_pythons_way_either(text: str) -> None:
    answer = f"{PYTHON.opens}set({text}){PYTHON.closes}"
    assert takes(format_of(PYTHON, True), Wanted([Tool("set", SET)], "required"), answer) is not None
