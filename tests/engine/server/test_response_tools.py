"""The tools of /v1/responses that are no plain functions: namespaces, texts, the client's shell, and OpenAI's own."""

from __future__ import annotations

import json
import re
import threading
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from engine.server.responses import functions
from engine.server.responses.functions import InputReader, shell_action, shown_tools
from engine.server.responses.lark import pattern_of
from engine.server.responses.routes import add_responses
from engine.server.responses.schema import ResponsesRequest
from engine.server.responses.translate import conversation_of
from engine.server.serving import Serving
from tests.engine.server.figures import logged
from tests.engine.server.process import ServerProcess
from tests.engine.server.tool_model import WEATHER, tool

WEATHER_TOOL: dict[str, Any] = {"type": "function", "name": "weather", "strict": False, "parameters": WEATHER}
SKY = {"type": "namespace", "name": "sky", "description": "Of the sky.", "tools": [WEATHER_TOOL]}
ORDER = 'start: line ~ 2 end\nline: ("up" | "down") " " /[0-9]{2}/ LF\nend: "stop"i\n%import common.LF\n'
EXPRESSION = r"((up|down) [0-9]{2}\n){2}[sS][tT][oO][pP]"
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Change it."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": ORDER}
SHELL = {"type": "local_shell"}
OF_OPENAI = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}
DOUBLED = "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), "a40:"])


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "Weather?", "max_output_tokens": 400, "seed": 3, **more}


def post(server: ServerProcess, **more: Any) -> dict[str, Any]:
    return server.ask("/v1/responses", **asked(**more))


def without_ids(response: dict[str, Any]) -> list[dict[str, Any]]:
    items = response["output"]
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def body_of(**more: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate(asked(**more))


def test_the_model_sees_a_namespaces_tools_under_one_name_each() -> None:
    two = [WEATHER_TOOL | {"description": "Tell it."}, WEATHER_TOOL | {"name": "wind", "description": None}]
    seen = [tool.function for tool in shown_tools(body_of(tools=[SKY | {"tools": two}]).tools or ())]
    assert [one["name"] for one in seen] == ["sky__weather", "sky__wind"]
    assert [one["description"] for one in seen] == ["Of the sky.\nTell it.", ""]


@pytest.mark.parametrize(
    "format_", [GRAMMAR, {"type": "grammar", "syntax": "regex", "definition": EXPRESSION}], ids=["lark", "regex"]
)
def test_a_text_for_a_tool_follows_the_tools_grammar_and_its_events_add_up_to_it(
    tool_server: ServerProcess, format_: dict[str, Any]
) -> None:
    more = {"tools": [PATCH | {"format": format_}], "tool_choice": {"type": "custom", "name": "patch"}}
    whole, found = post(tool_server, **more), tool_server.events("/v1/responses", **asked(**more))
    (call,), (item,) = whole["output"], found[-1]["response"]["output"]
    assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "patch", "completed")
    assert re.fullmatch(EXPRESSION, call["input"]) and without_ids(found[-1]["response"]) == without_ids(whole)
    deltas = [one["delta"] for one in found if one["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call["input"] and len(deltas) > 5
    (done,) = [one for one in found if one["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == call["input"] and done["item_id"] == item["id"]


@pytest.mark.parametrize("definition", ['start: "(" start ")" | "x"', "start: what"], ids=["recursive", "wrong"])
def test_a_grammar_that_cannot_be_forced_is_told_to_the_model(definition: str) -> None:
    (shown,) = shown_tools(body_of(tools=[PATCH | {"format": GRAMMAR | {"definition": definition}}]).tools or ())
    assert definition in shown.function["description"] and "pattern" not in str(shown.function["parameters"])
    assert shown.free


async def test_grammars_are_read_in_no_thread_that_answers_others_and_those_not_forced_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    noted: list[str] = []

    def read(definition: str) -> None:
        threads.append(threading.current_thread())

    def note(ignored: list[str]) -> None:
        noted.extend(ignored)
        raise InterruptedError

    async def with_key(scope: Any, receive: Any, send: Any) -> None:
        """Add what the server's own layers say of a request."""
        await app({**scope, "state": {"key": None}}, receive, send)

    monkeypatch.setattr(functions, "pattern_of", read)
    app = FastAPI()
    add_responses(app, cast(Serving, SimpleNamespace(note=note)), {}, {})
    formats = [GRAMMAR | {"definition": f'start: "{number}"'} for number in range(80)]  # more than are remembered
    tools = [{"type": "custom", "name": f"t{number}", "format": format_} for number, format_ in enumerate(formats)]
    transport = httpx.ASGITransport(with_key)
    async with httpx.AsyncClient(transport=transport, base_url="http://talon") as client:
        with pytest.raises(InterruptedError):
            await client.post("/v1/responses", json=asked(tools=tools))
    assert noted == ["tools.format"]
    assert len(threads) == 80 and threading.main_thread() not in threads


def test_an_input_is_read_wherever_its_arguments_are_cut() -> None:
    text = 'a"\\\n\té\U0001f600\u2028 {"input": "x"}'
    for escaped in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=escaped)
        for at in range(len(arguments) + 1):
            reader = InputReader()
            assert reader.feed(arguments[:at]) + reader.feed(arguments[at:]) == text
    assert InputReader().feed('{"input": "a\\ud800"}') == "a\ufffd"


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('start: "a"i? [B] /c./s\nB: "b" | "\\""\n', ["acx", "Abc\n", '"cc'], ["c", "bbcc"]),
        ('?start: (x ",")+ -> all\n  | "."  // the end\nx.2: /[0-9]/ ~ 2..3\n', ["12,", "123,45,", "."], ["1,", ""]),
        ("start: A{2} W{1,2} INT{,1}\nA: /a/\n%import common.WORD -> W\n%import common (INT, LF)", ["aab1"], ["ab"]),
    ],
)
def test_a_regular_grammar_becomes_an_expression_of_the_same_texts(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    pattern = pattern_of(grammar)
    assert pattern is not None
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []
    assert [text for text in others if re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize(
    "grammar",
    [
        "start: a\na: b\nb: a", 'a: "x"', "start: x", 'start: "a', "start: (/a/", "start: /a/ %", "%import common.LF",
        'start: "a"\n%ignore " "', "start: %import", "%import common.NO", "%import common.", "start: " + "(" * 99,
        "start: /a/ ~ x", "start: t{/a/}\nt{x}: x x", "start: /a/{1", DOUBLED,
    ],
)  # fmt: skip
def test_what_is_not_regular_has_no_expression(grammar: str) -> None:
    assert pattern_of(grammar) is None


def test_rules_within_many_groups_have_no_expression() -> None:
    rules = [f"r{number}: {'(' * (47 - number)}r{number + 1}{')' * (47 - number)}" for number in range(47)]
    assert pattern_of("\n".join(["start: r0", *rules, 'r47: "x"'])) is None
    assert pattern_of("\n".join([f"start: {'(' * 20}a{')' * 20}", f"a: {'(' * 20}b{')' * 20}", 'b: "x"'])) is not None


def test_a_command_for_the_clients_shell_comes_back_as_its_action(tool_server: ServerProcess) -> None:
    found = tool_server.events("/v1/responses", **asked(tools=[SHELL], **ONE_CALL))
    (item,) = found[-1]["response"]["output"]
    assert item["type"] == "local_shell_call" and item["action"]["type"] == "exec"
    assert not [one for one in found if one["type"].endswith(".delta")]
    assert [one["item"]["id"] for one in found if one["type"].startswith("response.output_item")] == [item["id"]] * 2


@pytest.mark.parametrize("timeout", ["1e999", "[" * 5000 + "]" * 5000, "1"], ids=len)
def test_a_command_that_cannot_be_read_is_none(timeout: str) -> None:
    action = shell_action(f'{{"command": ["ls"], "timeout_ms": {timeout}}}')
    assert (action["command"], action["timeout_ms"]) == ((["ls"], 1) if timeout == "1" else ([], None))


def test_tools_that_are_not_here_are_left_out_and_the_log_says_so(tool_server: ServerProcess) -> None:
    plain, left_out = (post(tool_server, tools=[*more, WEATHER_TOOL], **ONE_CALL) for more in ([], OF_OPENAI))
    assert without_ids(left_out) == without_ids(plain)
    assert left_out["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert post(tool_server, tools=OF_OPENAI, max_output_tokens=1)["output"]
    for one in OF_OPENAI:
        logged(tool_server, f"ignored field: tools.{one['type']}:")


LISTED = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None, "working_directory": "/"}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    {"type": "function_call", "call_id": "1", "name": "weather", "namespace": "sky", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:,"}]},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": 'a\n"b"', "id": "c"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    {"type": "local_shell_call", "id": "3", "status": "completed", "action": LISTED},
    {"type": "local_shell_call_output", "id": "3", "output": "a.py"},
]


def test_calls_of_every_kind_are_calls_of_functions_to_the_model() -> None:
    def call(number: str, name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": number, "function": function}]}

    note, body = "[input_image: not shown, this model reads text]", body_of(input=HISTORY)
    assert conversation_of(body.input) == [
        {"role": "user", "content": "Go."},
        call("1", "sky__weather"),
        {"role": "tool", "tool_call_id": "1", "content": note},
        call("2", "patch", input='a\n"b"'),
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        call("3", "local_shell", command=["ls"], working_directory="/"),
        {"role": "tool", "tool_call_id": "3", "content": "a.py"},
    ]
    assert body.ignored == ["input.web_search_call"]


@pytest.mark.parametrize("one", [WEATHER_TOOL, PATCH | {"format": GRAMMAR}], ids=["function", "text"])
def test_a_response_with_a_call_is_gone_on_from_as_if_it_were_told_again(
    tool_server: ServerProcess, one: dict[str, Any]
) -> None:
    first = post(tool_server, tools=[one], **ONE_CALL)
    (call,) = first["output"]
    result = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "clear"}
    kept = post(tool_server, tools=[one], previous_response_id=first["id"], input=[result], max_output_tokens=4)
    items = [{"role": "user", "content": "Weather?"}, call, result]
    told = post(tool_server, tools=[one], input=items, max_output_tokens=4)
    assert kept["usage"]["input_tokens"] == told["usage"]["input_tokens"]
    assert without_ids(kept) == without_ids(told)


def test_tools_that_the_input_adds_can_be_called(tool_server: ServerProcess) -> None:
    tools = [{"type": "namespace", "name": "functions", "tools": [PATCH | {"format": GRAMMAR}]}]
    added = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": tools}
    choice = {"type": "custom", "name": "patch", "namespace": "functions"}
    told = [added, {"role": "user", "content": "Weather?"}, added]
    (call,) = post(tool_server, input=told, tool_choice=choice)["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "functions", "patch")
    assert re.fullmatch(EXPRESSION, call["input"])


def test_a_tool_that_is_added_takes_the_place_of_an_earlier_one_of_its_name() -> None:
    newer = WEATHER_TOOL | {"description": "Newer."}
    body = body_of(tools=[WEATHER_TOOL, SHELL], input=[{"type": "additional_tools", "tools": [newer, SKY]}])
    told = [one.function for one in shown_tools(body.tools or (), body.added_tools)]
    assert [one["name"] for one in told] == ["weather", "local_shell", "sky__weather"]
    assert told[0]["description"] == "Newer."


def test_only_the_allowed_tools_are_called_though_all_are_shown(tool_server: ServerProcess) -> None:
    tools = [SKY, PATCH | {"format": GRAMMAR}, WEATHER_TOOL]
    named = [
        {"type": "function", "name": "weather", "namespace": "sky"},
        {"type": "function", "name": "sky__weather"},
        {"type": "namespace", "name": "sky"},
    ]
    shown = {post(tool_server, tools=tools, max_output_tokens=1)["usage"]["input_tokens"]}
    for one in named:
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [one, {"type": "web_search"}]}
        found = post(tool_server, tools=tools, tool_choice=allowed, parallel_tool_calls=False)
        called = [(item["type"], item.get("namespace"), item["name"]) for item in found["output"]]
        assert called == [("function_call", "sky", "weather")]
        shown.add(found["usage"]["input_tokens"])
    assert len(shown) == 1


def test_chat_knows_allowed_tools_too(tool_server: ServerProcess) -> None:
    named = [{"type": "function", "function": {"name": "b"}}]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 200}
    chat |= {"tools": [tool(name) for name in "abc"], "parallel_tool_calls": False}
    chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    for seed in range(3):
        (choice,) = tool_server.ask("/v1/chat/completions", **chat, seed=seed)["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["b"]
    named[0]["function"] = {"name": "d"}
    error = tool_server.post("/v1/chat/completions", **chat).json()["error"]
    assert error["param"] == "tool_choice.allowed_tools.tools"


def test_a_call_that_was_cut_off_can_be_sent_back(tool_server: ServerProcess) -> None:
    (call,) = post(tool_server, tools=[WEATHER_TOOL], max_output_tokens=60, **ONE_CALL)["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It was cut off."}
    told = [{"role": "user", "content": "Weather?"}, call, result]
    assert call["status"] == "incomplete" and body_of(input=told).ignored == ["arguments"]
    assert post(tool_server, tools=[WEATHER_TOOL], input=told, max_output_tokens=4)["output"]


def test_items_that_the_client_has_parsed_can_be_sent_back() -> None:
    part = {"type": "output_text", "text": "{}", "annotations": [], "parsed": {"a": 1}}
    items = [{"role": "assistant", "content": [part]}, HISTORY[1] | {"parsed_arguments": {"a": 1}}]
    body = body_of(input=items)
    assert body.ignored == [] and "parsed" not in str(conversation_of(body.input))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"client_metadata": {"session": "a"}}, "client_metadata"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.action.sources"]}, "include"),
        ({"include": ["reasoning.encrypted_content"]}, ""),
    ],
)
def test_a_field_that_changes_nothing_is_accepted_and_named(more: dict[str, Any], named: str) -> None:
    assert body_of(**more).ignored == [named] * bool(named)


def test_an_empty_input_is_answered(tool_server: ServerProcess) -> None:
    for empty, more in product(([], "", None), ({}, {"instructions": "Be brief."})):
        assert post(tool_server, input=empty, max_output_tokens=2, **more)["usage"]["output_tokens"] == 2


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "id": "msg_1", "content": [{"type": kind, "text": text}], **more}


CODEX: dict[str, Any] = {
    "tools": [WEATHER_TOOL, SKY, *OF_OPENAI],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "client_metadata": {"turn_id": "0", "x-codex-window-id": "0:0"},
}
CODEX_FIRST = [
    said("developer", "Be brief."),
    said("developer", "Use tools."),
    said("user", "/tmp"),
    said("user", "Go."),
]
THOUGHT = {"summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None}
CODEX_SECOND = [
    {"type": "reasoning", **THOUGHT},
    HISTORY[1] | {"id": "fc_1", "status": "completed"},
    {"type": "function_call_output", "id": "fco_1", "call_id": "1", "output": "clear"},
    said("assistant", "Clear.", phase="final_answer"),
    said("user", "And now?"),
]


@pytest.mark.parametrize("more", [[], CODEX_SECOND], ids=["first turn", "second turn"])
def test_a_turn_in_the_shape_of_codexs_is_answered(tool_server: ServerProcess, more: list[dict[str, Any]]) -> None:
    asked = {"input": [*CODEX_FIRST, *more], "max_output_tokens": 5, "seed": 3}
    found = tool_server.events("/v1/responses", **CODEX, **asked)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    logged(tool_server, "ignored field: client_metadata:")
