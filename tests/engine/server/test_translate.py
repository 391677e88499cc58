"""A client's request, as the engine takes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import RequestError
from engine.prompts import check_room
from engine.server.errors import ApiError, api_error
from engine.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from engine.server.settings import Settings
from engine.server.translate import chat_choices, names_of, places_for

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}


class Encoding:
    """An engine that makes one token of any prompt."""

    config = SimpleNamespace(queue=SimpleNamespace(size=4))
    target = SimpleNamespace(context=8)

    async def encode(self, prompt: Any, raw: bool = False) -> list[int]:
        return [7]

    def reserve(self, count: int) -> int:
        return count


ENGINE: Any = Encoding()


def chat(**more: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HI} | more)


def completion(**more: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi"} | more)


def test_more_choices_than_the_queue_ever_holds_are_refused_for_good() -> None:
    assert places_for(chat(n=4), 4, ENGINE, Settings("m")) == 4
    with pytest.raises(ApiError, match=r"^n: 5 answers .* 4 are the most") as refused:
        places_for(chat(n=5), 5, ENGINE, Settings("m"))
    assert refused.value.status == 400


async def test_a_top_k_of_minus_one_is_off_as_in_vllm() -> None:
    for given, taken in ((-1, 0), (0, 0), (5, 5), (None, None)):
        (choice,) = await chat_choices(chat(top_k=given), ENGINE, Settings("m"))
        assert choice.sampling.top_k == taken


@pytest.mark.parametrize(
    ("body", "error", "named"),
    [
        (chat(), "prompt: is empty", "messages"),
        (completion(), "prompt: is empty", "prompt"),
        (TokenizeRequest(prompt="hi"), "prompt: is empty", "prompt"),
        (TokenizeRequest.model_validate({"messages": HI}), "prompt: is empty", "messages"),
        (chat(max_tokens=9), "max_tokens=9: is over", "max_tokens"),
        (chat(max_completion_tokens=9), "max_tokens=9: is over", "max_completion_tokens"),
        (chat(response_format={"type": "json_object"}), "grammar: needs llguidance", "response_format"),
        (chat(response_format=SCHEMA), "grammar.json_schema: no", "response_format.json_schema.schema"),
        (chat(structured_outputs={"json": {}}), "grammar.json_schema: no", "structured_outputs.json"),
        (chat(structured_outputs={"choice": ["a"]}), "grammar.regex='(a)': no", "structured_outputs.choice"),
        (completion(structured_outputs={"regex": "a"}), "grammar.regex: no", "structured_outputs.regex"),
        (completion(structured_outputs={"grammar": "a"}), "grammar.grammar: no", "structured_outputs.grammar"),
        (chat(), "speculation.budget=9: no", "speculation.budget"),
        (chat(), "nothing is named", None),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(body: Any, error: str, named: str | None) -> None:
    told = api_error(RequestError(error), names_of(body))
    assert told.body.error.param == named and told.code is None
    assert str(told).startswith(named or error)


@pytest.mark.parametrize(("length", "max_tokens", "named"), [(8, 1, "messages"), (5, 4, "max_tokens")])
def test_a_context_that_is_too_short_has_openais_code(length: int, max_tokens: int, named: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_room([7] * length, max_tokens, context=8)
    told = api_error(refused.value, names_of(chat())).body.error
    assert (told.param, told.code) == (named, "context_length_exceeded")


async def test_a_prompt_over_the_servers_own_limit_has_it_too() -> None:
    with pytest.raises(ApiError, match=r"^messages: has 1 tokens, this server takes 0") as refused:
        await chat_choices(chat(), ENGINE, Settings("m", max_prompt_tokens=0))
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
