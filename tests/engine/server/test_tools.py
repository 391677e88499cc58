"""Tools in chat completions, with OpenAI's client. tests/engine/test_tool_drafts.py sees that drafts change no call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

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


def choice_of(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(**asked(**more)).choices[0]


def streamed(client: Any, **more: Any) -> Any:
    """The message that a stream's chunks add up to, and the chunks."""
    from openai.lib.streaming.chat import ChatCompletionStreamState

    state, chunks = ChatCompletionStreamState(), []
    for chunk in client.chat.completions.create(**asked(**more), stream=True):
        state.handle_chunk(chunk)
        chunks.append(chunk)
    return state.current_completion_snapshot, chunks


def said(choice: Any) -> Any:
    """What an answer says, without its random ids."""
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", calls, choice.finish_reason


def test_a_named_tool_is_called_with_arguments_of_its_schema_and_streams_them_in_pieces(client: Any) -> None:
    choice = choice_of(client)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    _, chunks = streamed(client)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [bool(one.id) for one in deltas] == [True] + [False] * (len(deltas) - 1) and len(deltas) > 2
    assert [one.function.name for one in deltas if one.function.name] == ["weather"]
    assert {one.index for one in deltas} == {0}


class Weather(BaseModel):
    sunny: bool


def test_a_call_that_the_client_has_parsed_can_be_sent_back(client: Any) -> None:
    parsing = asked(tools=[openai.pydantic_function_tool(Weather, name="weather")])
    message = client.chat.completions.parse(**parsing).choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "clear"}
    assert choice_of(client, messages=[*HI, message, result], tool_choice="none", max_tokens=3).message.content


def test_one_of_the_tools_is_called_where_one_is_required(client: Any) -> None:
    names = set()
    for seed in range(8):
        (call,) = choice_of(client, tool_choice="required", parallel_tool_calls=False, seed=seed).message.tool_calls
        names.add(call.function.name)
    assert names == {"weather", "now"}


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"])
def test_the_chunks_of_a_stream_add_up_to_the_whole_answer(client: Any, choice: Any) -> None:
    for temperature in (0, 1):
        more = {"tool_choice": choice, "temperature": temperature, "max_tokens": 120}
        whole, chunks = streamed(client, **more)
        assert said(whole.choices[0]) == said(choice_of(client, **more))
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert [reason for reason in reasons if reason] == reasons[-1:]


def test_a_call_is_finished_where_the_end_of_a_turn_is_a_stop_text(client: Any) -> None:
    """As Continue sends it. The end token comes as soon as it may."""
    ending = {"tool_choice": "required", "logit_bias": {"0": 100}}
    whole, chunks = streamed(client, **ending, stop=["<|end|>"])
    assert said(whole.choices[0]) == said(choice_of(client, **ending, stop=["<|end|>"]))
    assert said(whole.choices[0]) == said(choice_of(client, **ending))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_that_may_call_nothing_is_text(client: Any) -> None:
    message = choice_of(client, tool_choice="none", max_tokens=8).message
    assert message.tool_calls is None and message.content


def test_a_call_that_is_cut_off_ends_by_its_length(client: Any) -> None:
    choice = choice_of(client, max_tokens=60)
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length" and call.function.arguments.startswith("{")


def test_a_call_that_was_cut_off_can_be_sent_back(client: Any) -> None:
    message = choice_of(client, max_tokens=60).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It was cut off."}
    more = {"messages": [*HI, message, result], "tool_choice": "none", "max_tokens": 3}
    answer = client.chat.completions.create(**asked(**more))
    assert answer.choices[0].message.content and answer.metrics["ignored"] == ["arguments"]


def test_a_structured_answer_and_tools_go_together(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    more = {"tool_choice": "auto", "response_format": format_, "parallel_tool_calls": False}
    messages = (choice_of(client, seed=seed, **more).message for seed in range(20))
    message = next(message for message in messages if not message.tool_calls)
    jsonschema.validate(json.loads(message.content), schema)


def test_a_schema_that_no_grammar_takes_is_refused_by_its_tool(client: Any) -> None:
    wrong = tool(parameters={"properties": {"a": {"type": "x"}}})
    with pytest.raises(openai.BadRequestError) as refused:
        choice_of(client, tools=[TOOLS[1], wrong], tool_choice="required")
    assert refused.value.body["param"] == "tools[1].function.parameters"


def test_reasoning_is_apart(client: Any) -> None:
    """The random model never ends its reasoning, of which the template has written the beginning."""
    more: dict[str, Any] = {"tools": openai.NOT_GIVEN, "tool_choice": openai.NOT_GIVEN, "max_tokens": 12}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    message = choice_of(client, **more, extra_body=thinks).message
    assert not message.content and message.reasoning_content
    chunks = list(client.chat.completions.create(**asked(**more, extra_body=thinks), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == message.reasoning_content and not any(delta.content for delta in deltas)
    plain = choice_of(client, **more, extra_body={"ignore_eos": True}).message
    assert plain.content and plain.reasoning_content is None


def test_the_answer_is_between_the_prompt_and_its_suffix(client: Any, server: ServerProcess) -> None:
    where = {"model": "tiny", "prompt": "def f(", "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    filled = client.completions.create(**where, suffix="): pass")
    spelled = "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
    assert filled.choices[0].text == client.completions.create(**where | {"prompt": spelled}).choices[0].text
    assert filled.usage.prompt_tokens == len("def f(): pass") + 3
    with pytest.raises(openai.BadRequestError, match="suffix: needs a prompt that is text"):
        client.completions.create(**where | {"prompt": [5, 6]}, suffix="x")
    refused = server.post("/v1/completions", prompt="def f(", suffix="x").json()["error"]
    assert (refused["code"], refused["message"][:32]) == ("unsupported", "suffix: this model has no tokens")


def test_the_text_behind_the_cursor_is_drafted_from(client: Any) -> None:
    behind = "".join(f"value_{number} = number_{number}\n" for number in range(9))
    bias = {str(token): -100.0 for token in range(4)}
    more = {"structured_outputs": {"choice": [behind[:60]]}, "return_sources": True}
    answer = client.completions.create(
        model="tiny", prompt="x", suffix=behind, max_tokens=80, temperature=0, logit_bias=bias, extra_body=more
    )
    assert answer.choices[0].text == behind[:60]
