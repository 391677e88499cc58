"""Tools in chat completions, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.server.process import ServerProcess
from tests.engine.server.tool_model import WEATHER, tool

openai = pytest.importorskip("openai", reason="pip install openai")
jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
TOOLS = [tool(), tool("now", {"type": "object", "properties": {}})]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(tool_server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 400, "seed": 1}
    return {**usual, "tool_choice": NAMED, **more}


def streamed(client: Any, **more: Any) -> Any:
    """The message that a stream's chunks add up to, and the chunks."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state, chunks = ChatCompletionStreamState(), []
    for chunk in client.chat.completions.create(**asked(**more), stream=True):
        state.handle_chunk(chunk)
        chunks.append(chunk)
    return state.current_completion_snapshot, chunks


def said(completion: Any) -> Any:
    """What an answer says, without its random ids."""
    message = completion.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", calls, completion.choices[0].finish_reason


def test_a_named_tool_is_called_with_arguments_of_its_schema(client: Any) -> None:
    for seed in range(5):
        choice = client.chat.completions.create(**asked(seed=seed)).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_one_of_the_tools_is_called_where_one_is_required(client: Any) -> None:
    names = set()
    for seed in range(8):
        more = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        (call,) = client.chat.completions.create(**asked(**more)).choices[0].message.tool_calls
        names.add(call.function.name)
    assert names == {"weather", "now"}


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"])
def test_the_chunks_of_a_stream_add_up_to_the_whole_answer(client: Any, choice: Any) -> None:
    for temperature in (0, 1):
        more = {"tool_choice": choice, "temperature": temperature, "max_tokens": 120}
        whole, chunks = streamed(client, **more)
        assert said(whole) == said(client.chat.completions.create(**asked(**more)))
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert [reason for reason in reasons if reason] == reasons[-1:]


def test_a_call_streams_its_id_and_name_once_and_its_arguments_in_pieces(client: Any) -> None:
    _, chunks = streamed(client)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [bool(one.id) for one in deltas] == [True] + [False] * (len(deltas) - 1) and len(deltas) > 2
    assert [one.function.name for one in deltas if one.function.name] == ["weather"]
    assert {one.index for one in deltas} == {0}


def test_drafts_change_no_call(client: Any) -> None:
    for temperature in (0, 1):
        plain = asked(temperature=temperature, extra_body={"speculation": {"off": True}})
        drafted = asked(temperature=temperature)
        assert said(client.chat.completions.create(**plain)) == said(client.chat.completions.create(**drafted))


def test_what_the_grammar_forces_is_drafted(client: Any) -> None:
    answer = client.chat.completions.create(**asked(extra_body={"return_sources": True}))
    sources = [one["source"] for one in answer.choices[0].sources]
    assert sources.count("grammar") > len(sources) / 2


def test_an_answer_that_may_call_nothing_is_text(client: Any) -> None:
    choice = client.chat.completions.create(**asked(tool_choice="none", max_tokens=8)).choices[0]
    assert choice.message.tool_calls is None and choice.message.content


def test_a_conversation_goes_on_with_calls_and_their_results(client: Any) -> None:
    answer = client.chat.completions.create(**asked()).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "clear"}
    more = {"tool_choice": "auto", "max_tokens": 8, "messages": [*HI, answer, result]}
    assert client.chat.completions.create(**asked(**more)).choices[0].finish_reason


def test_a_call_that_is_cut_off_ends_by_its_length(client: Any) -> None:
    choice = client.chat.completions.create(**asked(max_tokens=60)).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length" and call.function.arguments.startswith("{")


def test_a_structured_answer_and_tools_go_together(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    kinds = set()
    for seed in range(20):
        more = {"tool_choice": "auto", "response_format": format_, "seed": seed, "parallel_tool_calls": False}
        message = client.chat.completions.create(**asked(**more)).choices[0].message
        if message.tool_calls:
            jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), {"type": "object"})
        else:
            jsonschema.validate(json.loads(message.content), schema)
        kinds.add(bool(message.tool_calls))
    assert False in kinds


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [TOOLS[1], tool(parameters={"properties": {"a": {"type": "x"}}})]}, "tools[1].function.parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}, {"role": "tool"}]}, "messages[1].content"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(client: Any, more: dict[str, Any], param: str) -> None:
    usual = {"tool_choice": "required"} if "tools" in more else {}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(**usual | more))
    assert refused.value.body["param"] == param


def test_a_model_whose_template_takes_no_tools_says_so(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="--tool-format"):
        client.chat.completions.create(**asked())


def test_reasoning_is_apart(client: Any) -> None:
    """The random model never ends its reasoning, of which the template has written the beginning."""
    more: dict[str, Any] = {"tools": openai.NOT_GIVEN, "tool_choice": openai.NOT_GIVEN, "max_tokens": 12}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    message = client.chat.completions.create(**asked(**more, extra_body=thinks)).choices[0].message
    assert not message.content and message.reasoning_content
    chunks = list(client.chat.completions.create(**asked(**more, extra_body=thinks), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == message.reasoning_content and not any(delta.content for delta in deltas)
    plain = client.chat.completions.create(**asked(**more, extra_body={"ignore_eos": True})).choices[0].message
    assert plain.content and plain.reasoning_content is None


def test_the_answer_is_between_the_prompt_and_its_suffix(client: Any, server: ServerProcess) -> None:
    where = {"model": "tiny", "prompt": "def f(", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    filled = client.completions.create(**where, suffix="): pass")
    spelled = "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
    assert filled.choices[0].text == client.completions.create(**where | {"prompt": spelled}).choices[0].text
    assert filled.usage.prompt_tokens == len("def f(): pass") + 3
    with pytest.raises(openai.BadRequestError, match="suffix: needs a prompt that is text"):
        client.completions.create(**where | {"prompt": [5, 6]}, suffix="x")
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="suffix: this model has no tokens"):
        other.completions.create(**where, suffix="x")


def test_the_text_behind_the_cursor_is_drafted_from(client: Any) -> None:
    behind = "".join(f"value_{number} = number_{number}\n" for number in range(9))
    bias = {str(token): -100.0 for token in range(4)}
    more = {"structured_outputs": {"choice": [behind[:60]]}, "return_sources": True}
    answer = client.completions.create(
        model="tiny", prompt="x", suffix=behind, max_tokens=80, temperature=0, logit_bias=bias, extra_body=more
    )
    assert answer.choices[0].text == behind[:60]
