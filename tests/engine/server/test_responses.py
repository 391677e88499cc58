"""OpenAI's /v1/responses, with the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.server.errors import ApiError
from engine.server.responses.store import ResponseStore
from tests.engine.server.process import KEY, ServerProcess
from tests.engine.server.tool_model import WEATHER

openai = pytest.importorskip("openai", reason="pip install openai")
jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

TOOLS = [{"type": "function", "name": "weather", "description": "Tell it.", "parameters": WEATHER, "strict": True}]
CALL = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def client(tool_server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "input": "Weather?", "max_output_tokens": 300, "temperature": 0}
    return {**usual, **more}


def outputs(response: Any) -> list[dict[str, Any]]:
    """A response's items, without their random ids."""
    return [{k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")} for item in response.output]


def test_a_response_has_its_text_and_its_tokens(client: Any) -> None:
    response = client.responses.create(**asked(max_output_tokens=6, instructions="Be brief."))
    assert response.output_text and (response.status, response.usage.output_tokens) == ("incomplete", 6)
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_function_is_called_as_its_schema_wants(client: Any) -> None:
    response = client.responses.create(**asked(tools=TOOLS, tool_choice=CALL))
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS, "tool_choice": CALL},
        {"max_output_tokens": 9},
        {"max_output_tokens": 9, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
    ],
)
def test_the_events_of_a_stream_add_up_to_the_whole_response(client: Any, more: dict[str, Any]) -> None:
    whole = client.responses.create(**asked(**more))
    events = list(client.responses.create(**asked(**more), stream=True))
    assert outputs(events[-1].response) == outputs(whole)
    assert events[-1].type == f"response.{whole.status}" and events[-1].response.usage.total_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    grown = "".join(event.delta for event in events if event.type.endswith(".delta"))
    (item,) = whole.output
    assert grown == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_a_response_goes_on_from_an_earlier_one(client: Any) -> None:
    first = client.responses.create(**asked(tools=TOOLS, tool_choice=CALL))
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "clear"}
    kept = client.responses.create(**asked(tools=TOOLS, previous_response_id=first.id, input=[result]))
    items = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), result]
    told = client.responses.create(**asked(tools=TOOLS, input=items))
    assert outputs(kept) == outputs(told) and kept.usage.input_tokens == told.usage.input_tokens


def test_a_response_that_was_cut_off_behind_an_inner_brace_of_a_call_can_be_gone_on_from(client: Any) -> None:
    city = {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}
    place = {"type": "object", **city}
    schema = {"type": "object", "properties": {"place": place, "days": {"type": "integer"}}, "required": ["place"]}
    said = '<tool_call>\n{"name": "weather", "arguments": {"place": {"city": "Rome"}'
    more = asked(tools=[TOOLS[0] | {"parameters": schema, "strict": False}], tool_choice=CALL)
    cut = client.responses.create(**more | {"max_output_tokens": len(said)})
    assert (cut.status, cut.output[0].arguments) == ("incomplete", '{"place": {"city": "Rome"}')
    assert client.responses.create(**asked(input="Go on.", previous_response_id=cut.id, max_output_tokens=3)).output


def test_only_stored_responses_can_be_got_again(client: Any) -> None:
    kept = client.responses.create(**asked(max_output_tokens=3))
    assert client.responses.retrieve(kept.id).output == kept.output
    client.responses.delete(kept.id)
    unkept = client.responses.create(**asked(max_output_tokens=3, store=False))
    for gone in (kept.id, unkept.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            client.responses.create(**asked(previous_response_id=gone))


def test_a_text_follows_a_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    closed = schema | {"additionalProperties": False}
    format_ = {"type": "json_schema", "name": "x", "schema": closed, "strict": True}
    jsonschema.validate(json.loads(client.responses.create(**asked(text={"format": format_})).output_text), schema)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": [{"type": "web_surf"}]}, "tools[0]"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"conversation": "x"}, "conversation"),
        ({"input": "x" * 9000}, "input: "),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}, "strict": True}}}, "text.format.schema"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(client: Any, more: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked(**more))
    assert refused.value.body["message"].startswith(named)


def test_keys_are_wanted_here_too(one_place: ServerProcess) -> None:
    def client(key: str) -> Any:
        return openai.OpenAI(base_url=f"{one_place.url}/v1", api_key=key, max_retries=0)

    kept = client(KEY).responses.create(**asked(max_output_tokens=1))
    assert client(KEY).responses.retrieve(kept.id).id == kept.id
    with pytest.raises(openai.AuthenticationError):
        client("wrong").responses.retrieve(kept.id)


def test_a_response_is_its_keys_own() -> None:
    store = ResponseStore()
    store.add(b"a", {"id": "x"}, [])
    assert store.find("x", b"a").response == {"id": "x"}
    with pytest.raises(ApiError, match="is not there"):
        store.find("x", b"b")


def test_the_store_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    store = ResponseStore(most=2, most_bytes=200)
    for number in "ab":
        store.add(b"", {"id": number}, [])
    store.find("a", b"")
    store.add(b"", {"id": "c"}, [])
    assert store.find("a", b"") and store.find("c", b"")
    with pytest.raises(ApiError):
        store.find("b", b"")
    store.add(b"", {"id": "d", "text": "x" * 150}, [])
    assert store.find("d", b"")
    with pytest.raises(ApiError):
        store.find("a", b"")
    store.add(b"", {"id": "e", "text": "x" * 300}, [])
    with pytest.raises(ApiError):
        store.find("e", b"")


async def test_the_agents_kit_runs_a_tool_and_answers(tool_server: ServerProcess) -> None:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    agents.set_tracing_disabled(True)
    calls = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Tell it."""
        calls.append(city)
        return "clear"

    client = openai.AsyncOpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)
    settings = agents.ModelSettings(temperature=0, tool_choice="required", extra_body={"logit_bias": None})
    agent = agents.Agent(
        name="a",
        model=agents.OpenAIResponsesModel(model="tiny", openai_client=client),
        tools=[weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    result = await agents.Runner.run(agent, "Weather?", max_turns=2)
    assert result.final_output == "clear" and calls
