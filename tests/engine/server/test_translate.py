"""A client's request, as the engine takes it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import Config
from engine.core.errors import OverContext, RequestError
from engine.core.params import SamplingParams, Speculation
from engine.frontend.prompts import check_room
from engine.server.errors import ApiError, anthropic_error, api_error
from engine.server.messages.schema import MessagesRequest
from engine.server.responses.schema import ResponsesRequest
from engine.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from engine.server.settings import Settings
from engine.server.tools.calling import Calling
from engine.server.translate import ChoiceRequest, chat_choices, names_of, owned, places_for, text_choices
from engine.server.vocabulary import Vocabulary
from engine.text.answer_format import AnswerFormat
from tests.conftest import tiny_tokenizer

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}


class Encoding:
    """An engine that makes one token of any prompt."""

    config = SimpleNamespace(queue=SimpleNamespace(size=4))
    target = SimpleNamespace(context=8)

    async def encode(self, prompt: Any, raw: bool = False, rendering: Any = None) -> list[int]:
        return [7]

    def check(self, sampling: SamplingParams) -> SamplingParams:
        return sampling.validate()

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


async def choices_of(body: ChatRequest, settings: Settings) -> list[ChoiceRequest]:
    calling = Calling.of(body, AnswerFormat(None, None, {}))
    return await chat_choices(body, ENGINE, settings, Vocabulary(tiny_tokenizer()), calling)


async def test_choices_are_drafted_for_from_their_owners_answers_unless_the_operator_shares_all() -> None:
    for share, owner, whose in ((False, "a", "a"), (False, None, None), (True, "a", ""), (True, None, "")):
        config = Config.model_validate({"drafter": {"share_answers": share}})
        asked = await choices_of(chat(n=2, speculation={"budget": 4}), Settings("m"))
        choices = owned(asked, owner, config)
        assert [one.sampling.owner for one in choices] == [whose, whose]
        assert [one.sampling.speculation for one in choices] == [Speculation(budget=4, owner=whose)] * 2
        (plain,) = owned(await choices_of(chat(), Settings("m")), owner, config)
        assert plain.sampling.owner == whose


async def test_stop_tokens_a_top_p_of_zero_and_a_top_k_of_minus_one_reach_the_engine() -> None:
    (choice,) = await choices_of(chat(stop_token_ids=[5, 6], top_p=0), Settings("m"))
    assert (choice.sampling.stop_token_ids, choice.sampling.top_p, choice.sampling.greedy) == ((5, 6), 0.0, True)
    for given, taken in ((-1, 0), (5, 5), (None, None)):
        (choice,) = await choices_of(chat(top_k=given), Settings("m"))
        assert choice.sampling.top_k == taken


@pytest.mark.parametrize(
    ("body", "error", "named"),
    [
        (chat(), "prompt: is empty", "messages"),
        (completion(), "prompt: is empty", "prompt"),
        (TokenizeRequest.model_validate({"messages": HI}), "prompt: is empty", "messages"),
        (chat(max_tokens=9), "max_tokens=9: is over", "max_tokens"),
        (chat(max_completion_tokens=9), "max_tokens=9: is over", "max_completion_tokens"),
        (chat(n_predict=9), "max_tokens=9: is over", "n_predict"),
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


@pytest.mark.parametrize(
    ("length", "max_tokens", "named", "anthropics"),
    [
        (8, 1, "messages", "messages: prompt is too long: 8 tokens > 8 maximum"),
        (5, 4, "max_tokens", "max_tokens: input length and `max_tokens` exceed context limit: 5 + 4 > 8"),
    ],
)
def test_a_context_that_is_too_short_has_openais_code_and_anthropics_words(
    length: int, max_tokens: int, named: str, anthropics: str
) -> None:
    with pytest.raises(OverContext) as refused:
        check_room([7] * length, max_tokens, context=8)
    told = api_error(refused.value, names_of(chat()))
    assert (told.param, told.code) == (named, "context_length_exceeded")
    assert anthropic_error(told)["error"]["message"] == anthropics


async def test_a_prompt_over_the_servers_own_limit_has_it_too() -> None:
    with pytest.raises(OverContext, match=r"^messages: has 1 tokens, this server takes 0") as refused:
        await choices_of(chat(), Settings("m", max_prompt_tokens=0))
    told = api_error(refused.value)
    assert (told.param, told.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("asked", "taken", "strictly"), [(3, 3, 3), (9, 7, 9), (10**12, 7, 10**12), (-1, 7, 7), (None, 7, 7)]
)
async def test_a_limit_beyond_the_context_means_the_rest_of_it(asked: Any, taken: int, strictly: int) -> None:
    for field in ("max_tokens", "max_completion_tokens", "n_predict"):
        (choice,) = await choices_of(chat(**{field: asked}), Settings("m"))
        assert choice.sampling.max_tokens == taken
    (choice,) = await choices_of(chat(max_tokens=asked), Settings("m", clamp_max_tokens=False))
    assert choice.sampling.max_tokens == strictly  # which the engine refuses if there is no room


@pytest.mark.parametrize(("asked", "taken", "strictly"), [(3, 3, 3), (9, 7, 9), (-1, 7, 7), (None, 7, 16), (0, 1, 1)])
async def test_so_does_that_of_a_completion(asked: Any, taken: int, strictly: int) -> None:
    body = completion(max_tokens=asked, echo=True)
    for settings, limit in ((Settings("m"), taken), (Settings("m", clamp_max_tokens=False), strictly)):
        (choice,) = await text_choices(body, ENGINE, settings, None, None)  # type: ignore[arg-type]
        assert choice.sampling.max_tokens == limit


async def test_a_prompt_that_leaves_less_room_than_min_tokens_is_refused() -> None:
    for min_tokens, fits in ((7, True), (8, False)):
        with nullcontext() if fits else pytest.raises(RequestError, match=r"^min_tokens=8: .*max_tokens=7"):
            asked = completion(max_tokens=-1, min_tokens=min_tokens)
            await text_choices(asked, ENGINE, Settings("m"), None, None)  # type: ignore[arg-type]


def test_fields_that_ask_for_what_is_not_there_are_named_and_those_sent_back_are_not() -> None:
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}, "caller": {"type": "direct"}}
    asked = [{"role": "user", "content": [text]}, {"role": "assistant", "content": [call]}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": asked, "thinking": thinking})
    assert body.ignored == ["budget_tokens", "cache_control"]
    said = {"role": "user", "content": "hi", "id": "a", "status": "completed"}
    more = {"text": {"verbosity": "low"}, "metadata": {"a": "b"}}
    assert ResponsesRequest.model_validate({"model": "m", "input": [said], **more}).ignored == ["verbosity"]
