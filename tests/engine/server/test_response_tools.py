"""The tools of /v1/responses that are no plain functions: namespaces, texts, the client's shell, and OpenAI's own."""

from __future__ import annotations

import json
import re
import threading
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from engine.server.responses import functions
from engine.server.responses.functions import InputReader, shown_tools
from engine.server.responses.lark import pattern_of
from engine.server.responses.routes import add_responses
from engine.server.responses.schema import ResponsesRequest
from engine.server.responses.translate import conversation_of
from engine.server.serving import Serving
from tests.engine.server.figures import until
from tests.engine.server.process import ServerProcess
from tests.engine.server.tool_model import WEATHER

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tell it.",
    "strict": False,
    "parameters": WEATHER,
}
SKY = {"type": "namespace", "name": "sky", "description": "Of the sky.", "tools": [WEATHER_TOOL]}
ORDER = 'start: line ~ 2 end\nline: ("up" | "down") " " /[0-9]{2}/ LF\nend: "stop"i\n%import common.LF\n'
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Change it."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": ORDER}
SHELL = {"type": "local_shell"}
OF_OPENAI = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
EXPRESSION = r"((up|down) [0-9]{2}\n){2}[sS][tT][oO][pP]"


DOUBLED = "\n".join(["start: a0", *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), "a40:"])


def asked(**more: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "input": "Weather?", "max_output_tokens": 400, "temperature": 1, "seed": 3}
    return {**usual, **more}


def post(server: ServerProcess, path: str = "/v1/responses", **more: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=asked(**more), timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(server: ServerProcess, **more: Any) -> list[dict[str, Any]]:
    text = httpx.post(f"{server.url}/v1/responses", json=asked(stream=True, **more), timeout=120).text
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def logged(server: ServerProcess, text: str) -> None:
    """Wait until the log says it."""
    until(lambda: any(text in line.get("event", "") for line in server.lines), within_s=10)


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def body_of(**more: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate(asked(**more))


# Namespaces.


def test_a_call_of_a_namespaces_tool_comes_back_with_both_names(tool_server: ServerProcess) -> None:
    (call,) = post(tool_server, tools=[SKY], tool_choice="required", parallel_tool_calls=False)["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "sky", "weather")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")


def test_the_model_sees_a_namespaces_tools_under_one_name_each() -> None:
    two = [SKY | {"tools": [WEATHER_TOOL, WEATHER_TOOL | {"name": "wind", "description": None}]}]
    functions = [tool.function for tool in shown_tools(body_of(tools=two).tools or ())]
    assert [one["name"] for one in functions] == ["sky__weather", "sky__wind"]
    assert [one["description"] for one in functions] == ["Of the sky.\nTell it.", ""]


def test_tools_that_become_the_same_name_are_refused(tool_server: ServerProcess) -> None:
    tools = [SKY, WEATHER_TOOL | {"name": "sky__weather"}]
    answer = httpx.post(f"{tool_server.url}/v1/responses", json=asked(tools=tools), timeout=60)
    assert (answer.status_code, answer.json()["error"]["message"][:26]) == (400, "tools: has 'sky__weather' ")


# Tools that take a text.


@pytest.mark.parametrize(
    "format_", [GRAMMAR, {"type": "grammar", "syntax": "regex", "definition": EXPRESSION}], ids=["lark", "regex"]
)
def test_a_text_for_a_tool_follows_the_tools_grammar(tool_server: ServerProcess, format_: dict[str, Any]) -> None:
    for seed in range(3):
        tools = [PATCH | {"format": format_}]
        (call,) = post(tool_server, tools=tools, tool_choice={"type": "custom", "name": "patch"}, seed=seed)["output"]
        assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "patch", "completed")
        assert re.fullmatch(EXPRESSION, call["input"]), call["input"]


def test_the_events_of_a_text_for_a_tool_add_up_to_it(tool_server: ServerProcess) -> None:
    more = {"tools": [PATCH | {"format": GRAMMAR}], "tool_choice": "required", "parallel_tool_calls": False}
    found = events(tool_server, **more)
    (whole,) = post(tool_server, **more)["output"]
    (item,) = found[-1]["response"]["output"]
    assert without_ids(item) == without_ids(whole)
    deltas = [one["delta"] for one in found if one["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == whole["input"] and len(deltas) > 5
    (done,) = [one for one in found if one["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == whole["input"] and done["item_id"] == item["id"]


@pytest.mark.parametrize("definition", ['start: "(" start ")" | "x"', "start: what"], ids=["recursive", "wrong"])
def test_a_grammar_that_cannot_be_forced_is_told_to_the_model_and_in_the_log(
    tool_server: ServerProcess, definition: str
) -> None:
    tools = [PATCH | {"format": GRAMMAR | {"definition": definition}}]
    (shown,) = shown_tools(body_of(tools=tools).tools or ())
    assert definition in shown.function["description"] and "pattern" not in str(shown.function["parameters"])
    assert shown.free
    post(tool_server, tools=tools, max_output_tokens=1)
    logged(tool_server, "ignored field: tools.format:")


async def test_grammars_are_read_in_no_thread_that_answers_others(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    noted: list[str] = []

    def read(definition: str) -> None:
        threads.append(threading.current_thread())

    def note(ignored: list[str]) -> None:
        noted.extend(ignored)
        raise InterruptedError

    monkeypatch.setattr(functions, "pattern_of", read)
    app = FastAPI()
    add_responses(app, cast(Serving, SimpleNamespace(note=note)), {}, {})
    formats = [GRAMMAR | {"definition": f'start: "{number}"'} for number in range(80)]  # more than are remembered
    tools = [{"type": "custom", "name": f"t{number}", "format": format_} for number, format_ in enumerate(formats)]
    transport = httpx.ASGITransport(with_key(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://talon") as client:
        with pytest.raises(InterruptedError):
            await client.post("/v1/responses", json=asked(tools=tools))
    assert noted == ["tools.format"]
    assert len(threads) == 80 and threading.main_thread() not in threads


def with_key(app: FastAPI) -> Any:
    """Return the application with what the server's own layers say of a request."""

    async def called(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {"key": None}}, receive, send)

    return called


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


# The client's shell.


def test_a_command_for_the_clients_shell_comes_back_as_its_action(tool_server: ServerProcess) -> None:
    more = {"tools": [SHELL], "tool_choice": "required", "parallel_tool_calls": False}
    found = events(tool_server, **more)
    (item,) = found[-1]["response"]["output"]
    assert item["type"] == "local_shell_call" and item["action"]["type"] == "exec"
    assert not [one for one in found if one["type"].endswith(".delta")]
    assert [one["item"]["id"] for one in found if one["type"].startswith("response.output_item")] == [item["id"]] * 2


# What is OpenAI's own.


def test_tools_that_are_not_here_are_left_out_and_the_log_says_so(tool_server: ServerProcess) -> None:
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    plain = post(tool_server, tools=[WEATHER_TOOL], **more)
    left_out = post(tool_server, tools=[*OF_OPENAI, WEATHER_TOOL], **more)
    assert [*map(without_ids, left_out["output"])] == [*map(without_ids, plain["output"])]
    assert left_out["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert post(tool_server, tools=OF_OPENAI, max_output_tokens=1)["output"]
    for tool in OF_OPENAI:
        logged(tool_server, f"ignored field: tools.{tool['type']}:")


# What a conversation holds of them.

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    {"type": "function_call", "call_id": "1", "name": "weather", "namespace": "sky", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:,"}]},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": 'a\n"b"', "id": "c"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    {
        "type": "local_shell_call",
        "id": "3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None, "working_directory": "/"},
    },
    {"type": "local_shell_call_output", "id": "3", "output": "a.py"},
]


def test_calls_of_every_kind_are_calls_of_functions_to_the_model() -> None:
    def call(number: str, name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": number, "function": function}]}

    note = "[input_image: not shown, this model reads text]"
    assert conversation_of(body_of(input=HISTORY).input) == [
        {"role": "user", "content": "Go."},
        call("1", "sky__weather"),
        {"role": "tool", "tool_call_id": "1", "content": note},
        call("2", "patch", input='a\n"b"'),
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        call("3", "local_shell", command=["ls"], working_directory="/"),
        {"role": "tool", "tool_call_id": "3", "content": "a.py"},
    ]


def test_a_conversation_with_calls_of_every_kind_goes_on(tool_server: ServerProcess) -> None:
    tools = [SKY, PATCH, SHELL]
    assert post(tool_server, tools=tools, input=HISTORY, max_output_tokens=3)["output"]
    logged(tool_server, "ignored field: input.web_search_call:")


def test_a_response_with_a_text_for_a_tool_is_gone_on_from_as_if_it_were_told_again(tool_server: ServerProcess) -> None:
    tools = [PATCH | {"format": GRAMMAR}]
    first = post(tool_server, tools=tools, tool_choice="required", parallel_tool_calls=False)
    result = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "done"}
    kept = post(tool_server, tools=tools, previous_response_id=first["id"], input=[result], max_output_tokens=4)
    items = [{"role": "user", "content": "Weather?"}, *first["output"], result]
    told = post(tool_server, tools=tools, input=items, max_output_tokens=4)
    assert kept["usage"]["input_tokens"] == told["usage"]["input_tokens"]
    assert [*map(without_ids, kept["output"])] == [*map(without_ids, told["output"])]


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
    shown = shown_tools(body.tools or (), body.added_tools)
    told = [(tool.function["name"], tool.function["description"].partition("\n")[0]) for tool in shown]
    assert told[0] == ("weather", "Newer.") and [name for name, _ in told[1:]] == ["local_shell", "sky__weather"]


# Choices of tools.


@pytest.mark.parametrize(
    "named",
    [
        {"type": "function", "name": "weather", "namespace": "sky"},
        {"type": "function", "name": "sky__weather"},
        {"type": "namespace", "name": "sky"},
    ],
)
def test_only_the_allowed_tools_are_called_though_all_are_shown(tool_server: ServerProcess, named: Any) -> None:
    tools = [SKY, PATCH | {"format": GRAMMAR}, WEATHER_TOOL]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named, {"type": "web_search"}]}
    shown = {post(tool_server, tools=tools, max_output_tokens=1)["usage"]["input_tokens"]}
    for seed in range(4):
        found = post(tool_server, tools=tools, tool_choice=allowed, parallel_tool_calls=False, seed=seed)
        assert [item.get("namespace") for item in found["output"]] == ["sky"]
        shown.add(found["usage"]["input_tokens"])
    assert len(shown) == 1


def test_a_choice_of_tools_that_are_not_there_is_refused(tool_server: ServerProcess) -> None:
    for choice, field in (
        ({"type": "custom", "name": "weather"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "tool_choice.tools"),
    ):
        body = asked(tools=[WEATHER_TOOL], tool_choice=choice)
        error = httpx.post(f"{tool_server.url}/v1/responses", json=body, timeout=60).json()["error"]
        assert error["param"] == field and error["message"].startswith(f"{field}: ")


def test_chat_knows_allowed_tools_too(tool_server: ServerProcess) -> None:
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 200}
    function = {key: WEATHER_TOOL[key] for key in ("name", "description", "parameters")}
    chat["tools"] = [{"type": "function", "function": function | {"name": name}} for name in ("a", "b", "c")]
    named = [{"type": "function", "function": {"name": "b"}}]
    for seed in range(4):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
        body = chat | {"tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body, timeout=60).json()
        assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["b"]
    named[0]["function"] = {"name": "d"}
    error = httpx.post(f"{tool_server.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert error["param"] == "tool_choice.allowed_tools.tools"


# Fields.


@pytest.mark.parametrize(
    "more",
    [
        {"client_metadata": {"session": "a"}},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"truncation": "auto"},
        {"include": ["web_search_call.action.sources"]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_field_that_changes_nothing_is_accepted_and_named_in_the_log(
    tool_server: ServerProcess, more: dict[str, Any]
) -> None:
    assert post(tool_server, max_output_tokens=2, **more)["output"]
    (name,) = more
    logged(tool_server, f"ignored field: {name}:")


def test_plain_reasoning_is_no_ignored_field() -> None:
    assert body_of(include=["reasoning.encrypted_content"]).ignored == []


@pytest.mark.parametrize("more", [{"instructions": "Be brief."}, {}], ids=["instructed", "bare"])
@pytest.mark.parametrize("empty", [[], "", None])
def test_an_empty_input_is_answered(tool_server: ServerProcess, empty: Any, more: dict[str, Any]) -> None:
    assert post(tool_server, input=empty, max_output_tokens=2, **more)["usage"]["output_tokens"] == 2


# A coding client, in the shape of Codex 0.171's requests.


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "id": "msg_1", "content": [{"type": kind, "text": text}], **more}


CODEX: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "input": [
        said("developer", "Be brief."),
        said("developer", "Use tools."),
        said("user", "/tmp"),
        said("user", "Go."),
    ],
    "tools": [WEATHER_TOOL, SKY, *OF_OPENAI],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "client_metadata": {"turn_id": "0", "x-codex-window-id": "0:0"},
}
CODEX_CALLS = [
    {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "encrypted_content": None,
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "1",
        "name": "weather",
        "namespace": "sky",
        "arguments": "{}",
        "status": "completed",
    },
    {"type": "function_call_output", "id": "fco_1", "call_id": "1", "output": "clear"},
    said("assistant", "Clear.", phase="final_answer"),
    said("user", "And now?"),
]


@pytest.mark.parametrize("more", [[], CODEX_CALLS], ids=["first turn", "second turn"])
def test_a_coding_clients_turn_is_answered(tool_server: ServerProcess, more: list[dict[str, Any]]) -> None:
    body = CODEX | {"input": [*CODEX["input"], *more], "max_output_tokens": 5}
    answer = httpx.post(f"{tool_server.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    kinds = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
