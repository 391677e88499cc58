"""OpenAI's /v1/responses, with the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.server.errors import ApiError
from engine.server.responses.store import ResponseStore
from tests.engine.server.process import KEY, ServerProcess
from tests.engine.server.test_response_tools import SKY, WEATHER_TOOL
from tests.engine.server.tool_model import WEATHER

openai = pytest.importorskip("openai", reason="pip install openai")
jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

TOOLS = [WEATHER_TOOL | {"strict": True}]
CALL = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def client(tool_server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "Weather?", "max_output_tokens": 300, "temperature": 0, **more}


def outputs(response: Any) -> list[dict[str, Any]]:
    """A response's items, without their random ids."""
    return [{k: v for k, v in item.to_dict().items() if k not in ("id", "call_id")} for item in response.output]


def test_a_response_has_its_text_and_its_tokens_and_can_be_got_again_only_where_it_is_stored(client: Any) -> None:
    kept = client.responses.create(**asked(max_output_tokens=6, instructions="Be brief."))
    assert kept.output_text and (kept.status, kept.usage.output_tokens) == ("incomplete", 6)
    assert kept.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(kept.id).output == kept.output
    client.responses.delete(kept.id)
    unkept = client.responses.create(**asked(max_output_tokens=3, store=False))
    for gone in (kept.id, unkept.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            client.responses.create(**asked(previous_response_id=gone))


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
    if "tools" in more:
        assert (item.type, item.name, whole.status) == ("function_call", "weather", "completed")
        jsonschema.validate(json.loads(item.arguments), WEATHER)


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": CALL, "max_output_tokens": 60}])
def test_the_item_in_which_a_stream_was_cut_off_ends_incomplete(client: Any, more: dict[str, Any]) -> None:
    events = list(client.responses.create(**asked(max_output_tokens=9) | more, stream=True))
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert done.status == "incomplete" and [done] == events[-1].response.output


def test_a_response_that_was_cut_off_behind_an_inner_brace_of_a_call_can_be_gone_on_from(client: Any) -> None:
    city = {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}
    place = {"type": "object", **city}
    schema = {"type": "object", "properties": {"place": place, "days": {"type": "integer"}}, "required": ["place"]}
    said = '<tool_call>\n{"name": "weather", "arguments": {"place": {"city": "Rome"}'
    more = asked(tools=[WEATHER_TOOL | {"parameters": schema}], tool_choice=CALL)
    cut = client.responses.create(**more | {"max_output_tokens": len(said)})
    assert (cut.status, cut.output[0].arguments) == ("incomplete", '{"place": {"city": "Rome"}')
    assert client.responses.create(**asked(input="Go on.", previous_response_id=cut.id, max_output_tokens=3)).output


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}], ids=["typed", "null", "untyped"])
def test_a_stored_item_may_be_referred_to_by_its_id(client: Any, kind: dict[str, Any]) -> None:
    first, again = {"role": "user", "content": "Weather?"}, {"role": "user", "content": "And now?"}
    (item,) = client.responses.create(**asked(input=[first], max_output_tokens=6)).output
    told, referred = (
        client.responses.create(**asked(input=[first, one, again], max_output_tokens=6))
        for one in (item.to_dict(), {"id": item.id, **kind})
    )
    assert referred.usage.input_tokens == told.usage.input_tokens and outputs(referred) == outputs(told)


def test_a_reference_to_a_call_may_be_followed_by_its_output(client: Any) -> None:
    first = {"role": "user", "content": "Weather?"}
    (call,) = client.responses.create(**asked(input=[first], tools=TOOLS, tool_choice=CALL)).output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "clear"}
    told, referred = (
        client.responses.create(**asked(input=[first, one, result], tools=TOOLS, max_output_tokens=6))
        for one in (call.to_dict(), {"type": "item_reference", "id": call.id})
    )
    assert referred.usage.input_tokens == told.usage.input_tokens and outputs(referred) == outputs(told)


def test_a_reference_to_a_call_that_was_cut_off_says_what_the_call_itself_does(client: Any) -> None:
    said = asked(tools=TOOLS, tool_choice=CALL, max_output_tokens=50)
    cut = client.responses.create(**said)
    assert cut.status == "incomplete" and not cut.output[0].arguments.endswith("}")
    plain, call = {"role": "user", "content": "Go on."}, cut.output[0].model_dump(exclude_none=True)
    none, itself, reference = (
        client.responses.create(**asked(input=[*one, plain])) for one in ([], [call], [{"id": call["id"]}])
    )
    assert none.usage.input_tokens < itself.usage.input_tokens == reference.usage.input_tokens


def test_an_item_that_is_not_stored_is_not_found(client: Any) -> None:
    kept, unkept = (client.responses.create(**asked(max_output_tokens=1, store=store)) for store in (True, False))
    for number in ("x", "msg__0", unkept.output[0].id, f"{kept.output[0].id}9", kept.output[0].id[4:]):
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{number}' not found") as refused:
            client.responses.create(**asked(input=[{"type": "item_reference", "id": number}]))
        assert refused.value.body["param"] == "input"


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
        ({"tools": [SKY, WEATHER_TOOL | {"name": "sky__weather"}]}, "tools: has 'sky__weather' "),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice.name"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            },
            "tool_choice.tools",
        ),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}, {"id": "x"}]}, "input"),
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
    error = refused.value.body
    assert error["message"].startswith(named) and error["message"].startswith(error["param"])


def test_a_stream_of_a_response_that_does_not_fit_says_so_in_its_last_event(server: ServerProcess) -> None:
    events = server.events("/v1/responses", input="x" * 2000)
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1]
    error = events[1]["response"]["error"]
    assert error["code"] == "context_length_exceeded" and "maximum context length is 512 tokens" in error["message"]
    assert error["message"].startswith("input: ")


def test_a_response_is_its_keys_own(one_place: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{one_place.url}/v1", api_key=KEY, max_retries=0)
    kept = client.responses.create(**asked(max_output_tokens=1))
    assert client.responses.retrieve(kept.id).id == kept.id
    store = ResponseStore()
    store.add(b"a", {"id": "x"}, [])
    assert store.find("x", b"a").response == {"id": "x"}
    with pytest.raises(ApiError, match="is not there"):
        store.find("x", b"b")


def test_an_item_is_its_keys_own() -> None:
    store, item = ResponseStore(), {"id": "msg_1_0"}
    store.add(b"a", {"id": "resp_1", "output": [item]}, [])
    assert store.item("msg_1_0", b"a") == item
    with pytest.raises(ApiError, match="Item with id 'msg_1_0' not found") as refused:
        store.item("msg_1_0", b"b")
    assert refused.value.status == 404


def test_the_store_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    store = ResponseStore(most=2, most_bytes=200)

    def kept() -> str:
        return "".join(store._kept)

    for number in "ab":
        store.add(b"", {"id": number}, [])
    store.find("a", b"")
    store.add(b"", {"id": "c"}, [])
    assert kept() == "ac"
    store.add(b"", {"id": "d", "text": "x" * 170}, [])
    assert kept() == "d"
    store.add(b"", {"id": "e", "text": "x" * 300}, [])
    assert kept() == "d", "it is too large"
