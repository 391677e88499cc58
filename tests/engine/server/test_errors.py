"""What a client is told of an error."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from engine.core.errors import (
    EngineClosed,
    NotANumber,
    ProtocolError,
    QueueFull,
    RequestError,
    WorkerDied,
    shown,
)
from engine.server.errors import api_error
from engine.server.schema import ChatRequest, CompletionRequest
from tests.engine.server.tool_model import tool

HI = [{"role": "user", "content": "hi"}]
HALF = "\ud83d"
HALVED = "holds half a character"


def refusal(kind: Any, fields: dict[str, Any]) -> Any:
    """What a client is told of a body with these fields: an `ErrorDetail`."""
    with pytest.raises(ValidationError) as wrong:
        TypeAdapter(kind).validate_python({"model": "m"} | fields)
    errors = [error | {"loc": ("body", *error["loc"])} for error in wrong.value.errors()]
    return api_error(RequestValidationError(errors)).body.error


def chat_refusal(fields: dict[str, Any]) -> Any:
    return refusal(ChatRequest, {"messages": HI} | fields)


def chat(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HI} | more)


def completion(**more: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x"} | more)


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("max_tokens=9: too many"), 400, "max_tokens"),
        (RequestError("prompt: is empty"), 400, "prompt"),
        (QueueFull("queue.size=2: full"), 429, None),
        (WorkerDied("the verifier cannot be started again"), 503, None),
        (EngineClosed("the engine was closed"), 503, None),
        (NotANumber("logits are not numbers"), 500, None),
        (ValueError("secret path"), 500, None),
        (ProtocolError("secret bytes"), 500, None),
    ],
)
def test_an_error_has_a_status_names_the_field_and_tells_nothing_that_nobody_expected(
    error: Exception, status: int, param: str | None
) -> None:
    told = api_error(error)
    assert (told.status, told.body.error.param) == (status, param)
    assert ("Retry-After" in told.headers) == (status in (429, 503))
    assert "secret" not in told.body.model_dump_json()


def test_a_body_without_its_content_type_is_told_the_header() -> None:
    """Curl's -d sends another one, and FastAPI then hands the body over unread."""
    wrong = [{"type": "model_attributes_type", "loc": ("body",), "msg": "Input should be a valid dictionary"}]
    told = api_error(RequestValidationError(wrong, body=b'{"model": "m"}'))
    assert told.status == 400 and "Content-Type: application/json" in str(told)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "all"}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice.function.name",
        ),
        ({"messages": [*HI, {"role": "tool"}]}, "messages[1].content"),
        ({"maxTokens": 1}, "maxTokens"),
        ({"max-tokens": 1}, "max-tokens"),
        ({"str": 1}, "str"),
        ({"messages": [{"role": "user", "content": "x", "toolCalls": 1}]}, "messages[0].toolCalls"),
        ({"x" * 1000: 1}, "x" * 64),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"logit_bias": {"1": 200}}, "logit_bias.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"stream_options": {"no": True}}, "stream_options.no"),
        ({"n": True}, "n"),
        ({"temperature": False}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"speculation": {"owner": "a"}}, "speculation.owner"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_wrong_fields_are_named_by_their_path(fields: dict[str, object], param: str) -> None:
    assert chat_refusal(fields).param == param


@pytest.mark.parametrize("arguments", ["{", "[1]", "x", '{"a": 1e999}'])
def test_a_call_that_was_cut_off_refuses_no_later_turn_and_is_one_of_an_object_to_the_template(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    (seen,) = body.messages[0].plain()["tool_calls"]
    assert seen["function"]["arguments"] == {} and body.ignored == ["arguments"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("store", True), ("modalities", ["text", "audio"]), ("prediction", {"type": "content", "content": "x"})],
)
def test_what_is_not_supported_is_refused_as_that(field: str, value: Any) -> None:
    told = chat_refusal({field: value})
    assert (told.param, told.code) == (field, "unsupported") and field in told.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages: has 0 items; give at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"response_format": {}}, "response_format: names no type"),
        ({"response_format": {"type": "xml"}}, "response_format: type 'xml' is none of 'text', 'json_object', "),
        ({"response_format": {"type": "x" * 5000}}, f"response_format: type {shown('x' * 5000)} is none of 'text'"),
        ({"temperature": -1}, "temperature: should be greater than or equal to 0"),
        ({"seed": True}, "seed: should be a number; true is none"),
        ({"stop": 5}, "stop: should be a valid string or should be a valid list"),
        ({"stop": ["a"] * 17}, "stop: has 17 items; give at most 16"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: is missing; give a text, or text p"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]: should be a valid dictionary"),
        ({"model": HALF}, f"model: {HALVED}"),
        ({"stop": HALF}, f"stop: {HALVED}"),
        ({"stop": ["end", HALF]}, f"stop: {HALVED}"),
        ({"messages": [{"role": "user", "content": HALF}]}, f"messages[0].content: {HALVED}"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
            f"messages[0].content[0].text: {HALVED}",
        ),
        ({"structured_outputs": {"regex": HALF}}, f"structured_outputs.regex: {HALVED}"),
        ({"structured_outputs": {"choice": ["a", HALF]}}, f"structured_outputs.choice: {HALVED}"),
        ({"user": HALF}, f"user: {HALVED}"),
    ],
)
def test_what_is_wrong_is_said_without_the_names_of_a_library(fields: dict[str, object], said: str) -> None:
    told = chat_refusal(fields)
    assert told.message.startswith(said) and told.param == said.partition(":")[0]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "give a text"),
        ([[]], "give a text"),
        (["a", 1], "give a text"),
        ({"text": "a"}, "give a text"),
        ([True], "give a text"),
        ([[1, False]], "give a text"),
        (HALF, HALVED),
        (["a", HALF], HALVED),
    ],
)
def test_of_a_wrong_prompt_the_client_learns_what_a_prompt_is(prompt: object, said: str) -> None:
    told = refusal(CompletionRequest, {"prompt": prompt})
    assert told.param == "prompt" and told.message.startswith(f"prompt: {said}")


def test_a_field_whose_name_begins_like_the_prompts_is_another() -> None:
    told = refusal(CompletionRequest, {"prompt": "a", "prompt_logprobs": "x", "temperature": -1})
    assert told.param in ("prompt_logprobs", "temperature")


def test_a_long_list_of_junk_is_refused_by_its_first_item() -> None:
    for prompt in ([-1] * 100_000, [[-1] * 100_000]):
        with pytest.raises(ValidationError) as caught:
            completion(prompt=prompt)
        assert caught.value.error_count() < 10


def test_what_asks_for_nothing_is_let_through() -> None:
    idle = {"tools": [], "tool_choice": "none", "functions": None, "store": False, "n": None, "logprobs": None}
    idle |= {"top_logprobs": 0, "max_tokens": 5, "max_completion_tokens": 5, "stream": None, "ignore_eos": None}
    said = {"role": "assistant", "content": "yes", "tool_calls": [], "annotations": [], "refusal": None, "audio": None}
    body = chat(messages=[*HI, said], **idle)
    assert body.n == 1 and body.logprobs is False and body.temperature == 1 and body.limit == 5
    assert not chat(stream=True, stream_options={"include_usage": None, "include_obfuscation": False}).includes_usage
    assert completion(best_of=1, suffix=None).max_tokens == 16
    assert chat(top_p=0).top_p == 0
    for given, taken in ((False, None), (None, None), (0, 0), (2, 2)):
        assert completion(logprobs=given).logprobs == taken


def test_messages_become_what_chat_templates_take() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "ann"}]
    assert [message.plain() for message in chat(messages=messages).messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ann"},
    ]
    for empty in ({"content": None}, {}, {"content": []}, {"content": ""}):
        body = chat(messages=[*HI, {"role": "assistant"} | empty, *HI])
        assert body.messages[1].plain() == {"role": "assistant", "content": ""}


def test_what_changes_no_answer_is_let_through_and_named() -> None:
    useless = {"metadata": {"a": 1}, "prompt_cache_key": "x", "prompt_cache_retention": "24h", "verbosity": "low"}
    useless |= {"reasoning_effort": "low", "safety_identifier": "x", "service_tier": "flex"}
    useless |= {"stream_options": {"include_usage": True}}
    for name, value in useless.items():
        assert chat(**{name: value}).ignored == completion(**{name: value}).ignored == [name]
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    for said in ({"content": [part]}, {"content": "a", "cache_control": {"type": "ephemeral"}}):
        assert chat(messages=[{"role": "user"} | said]).ignored == ["cache_control"]
    assert chat(service_tier="auto", metadata={}, verbosity=None).ignored == []
