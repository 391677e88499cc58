"""The official client, sync and async, against the real server."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.engine.server.figures import refusals, settle, tokens, until
from tests.engine.server.process import KEY, ServerProcess, occupied

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "1 2 3 1 2 3 1 2"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 12, **more})


def test_a_chat_answer_has_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0, extra_body={"ignore_eos": True})
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    prompt = client.post("/../tokenize", body={"messages": HI}, cast_to=object)
    assert answer.usage.prompt_tokens == prompt["count"]
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 12 + prompt["count"])


def test_a_stream_opens_with_the_role_and_ends_with_the_reason_and_usage(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0, extra_body={"ignore_eos": True})
    options = {"include_usage": True}
    chunks = list(chat(client, temperature=0, stream=True, stream_options=options, extra_body={"ignore_eos": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    rounds = whole.metrics["rounds"]
    assert whole.metrics["decoding_s"] > 0 and whole.metrics["exact"]
    assert len(chunks) == 1 + (rounds + 1) + 1 + 1  # role, a chunk a round and one for the prefill, reason, usage


def test_the_same_seed_gives_the_same_text_and_none_a_random_one(client: openai.OpenAI) -> None:
    texts = [chat(client, seed=7).choices[0].message.content for _ in range(2)]
    assert texts[0] == texts[1]
    assert len({chat(client).choices[0].message.content for _ in range(4)}) > 1


def test_n_choices_are_different_answers_and_the_first_is_that_of_the_seed(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) > 1
    assert texts[:2] == [chat(client, seed=seed).choices[0].message.content for seed in (7, 8)]
    one = chat(client, seed=7)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens


def test_a_stream_of_n_choices_has_the_texts_of_the_plain_call(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    for chunk in chat(client, n=3, seed=7, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = chat(client, n=3, seed=7)
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


def test_without_a_limit_an_answer_may_take_the_rest_of_the_context(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=None, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [-1, 512, 10**12])
def test_a_limit_beyond_the_context_means_the_rest_of_it(client: openai.OpenAI, field: str, limit: int) -> None:
    answer = chat(client, temperature=0, extra_body={"ignore_eos": True}, **{"max_tokens": None, field: limit})
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"


def test_so_does_that_of_every_prompt_of_a_batch(client: openai.OpenAI) -> None:
    for limit in (-1, 1000):
        more = {"max_tokens": limit, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(model="tiny", prompt=["a" * 500, "a" * 400], **more)  # type: ignore[call-overload]
        assert answer.usage.completion_tokens == 12 + 112


def test_every_chunk_counts_the_tokens_so_far_if_it_is_asked_to(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, n=2, stream=True, stream_options=options, extra_body={"ignore_eos": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 24
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_the_answer_and_once_the_log_name_the_fields_that_had_no_effect(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    useless: dict[str, Any] = {"verbosity": "low", "metadata": {"a": "b"}, "prompt_cache_key": "x"}
    plain = chat(client, seed=1)
    answers = [chat(client, seed=1, **useless) for _ in range(2)]
    assert plain.metrics["ignored"] == []
    for answer in answers:
        assert answer.metrics["ignored"] == sorted(useless)
        assert answer.choices[0].message.content == plain.choices[0].message.content
    *_, last = chat(client, stream=True, stream_options={"include_usage": True}, **useless)
    assert last.metrics["ignored"] == sorted(useless)
    for name in useless:
        until(lambda name=name: any(f"ignored field: {name}:" in line["event"] for line in server.lines))  # type: ignore[misc]
        assert sum(f"ignored field: {name}:" in line["event"] for line in server.lines) == 1


def test_an_answer_may_be_sent_back_and_may_be_empty(client: openai.OpenAI) -> None:
    said = chat(client).choices[0].message
    for message in (said, said.model_dump(), {"role": "assistant", "content": None}, {"role": "assistant"}):
        assert chat(client, messages=[*HI, message, *HI]).choices[0].message.content


def test_an_answer_continues_the_last_message_only_if_it_is_asked_to(client: openai.OpenAI) -> None:
    said = [*HI, {"role": "assistant", "content": "4 5"}]

    def prompt(**more: Any) -> list[int]:
        answer: Any = client.post("/../tokenize", body={"messages": said, **more}, cast_to=object)
        return list(answer["tokens"])

    ends = prompt(add_generation_prompt=False)
    assert prompt() == [*ends, 2]  # <|assistant|>
    assert prompt(continue_final_message=True) == ends  # this template writes nothing after a message
    for more in ({}, {"continue_final_message": True}):
        assert chat(client, messages=said, extra_body=more).usage.prompt_tokens == len(prompt(**more))
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, messages=said, extra_body={"continue_final_message": True, "add_generation_prompt": True})
    assert refused.value.param == "continue_final_message"


def test_variables_of_the_chat_template_are_let_through_and_its_arguments_are_not(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={"chat_template_kwargs": {"chat_template": "x"}})
    assert refused.value.param == "chat_template_kwargs.chat_template"


def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}).choices[0].message.content
    stop = whole[5:7]
    answer = chat(client, temperature=0, max_tokens=40, stop=stop, extra_body={"ignore_eos": True}).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content == whole[: whole.index(stop)]


def test_the_answer_says_what_drafting_brought(client: openai.OpenAI) -> None:
    drafted = chat(client, temperature=0, max_tokens=60, extra_body={"ignore_eos": True, "return_sources": True})
    figures = drafted.metrics["speculative_decoding"]
    assert figures["drafts"] > 0 and figures["accepted_tokens"] == sum(figures["accepted_per_position"])
    sources = [token["source"] for token in drafted.choices[0].sources]
    assert len(sources) == 60
    off = {"ignore_eos": True, "speculation": {"off": True}}
    plain = chat(client, temperature=0, max_tokens=60, extra_body=off)
    assert plain.choices[0].message.content == drafted.choices[0].message.content
    assert plain.metrics["speculative_decoding"]["drafts"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("audio", {"voice": "alloy", "format": "mp3"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("store", True),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **{field: value})
    assert refused.value.param == field and field in refused.value.message and refused.value.code == "unsupported"


def test_pictures_are_refused(client: openai.OpenAI) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="type"):
        chat(client, messages=[{"role": "user", "content": picture}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", -1),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("n", True),
        ("messages", []),
        ("presence_penalty", 3),
        ("stop", [""]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("seed", "seven"),
        ("n", 65),
    ],
)
def test_bad_requests_name_the_field(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **{field: value})
    assert re.split(r"[.[]", refused.value.param or "")[0] == field, refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_a_prompt_over_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 512") as refused:
        chat(client, messages=[{"role": "user", "content": "x" * 600}], max_tokens=None)
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_grammar_is_named_as_the_client_sent_it(client: openai.OpenAI, stream: bool) -> None:
    for name, sent in (("regex", "a(b"), ("json", {"type": "no such type"}), ("json", {"title": "\ud83d"})):
        body = json.dumps({"model": "tiny", "messages": HI, "stream": stream, "structured_outputs": {name: sent}})
        answer = httpx.post(f"{client.base_url}chat/completions", content=body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"structured_outputs.{name}"


def test_half_a_character_is_refused(client: openai.OpenAI) -> None:
    for field in ("stop", "prompt", "model"):
        body = json.dumps({"model": "tiny", "prompt": "hi", field: "\ud83d"})
        answer = httpx.post(f"{client.base_url}completions", content=body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        chat(client, model="gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completions_go_on_with_texts_tokens_and_batches(client: openai.OpenAI) -> None:
    def complete(prompt: Any, **more: Any) -> Any:
        more = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}, **more}
        return client.completions.create(model="tiny", prompt=prompt, **more)

    text = complete("abc abc")
    tokens = client.post("/../tokenize", body={"prompt": "abc abc"}, cast_to=object)["tokens"]
    assert complete(tokens).choices[0].text == text.choices[0].text
    batch = complete(["abc abc", "xyz", "abc abc"], n=1)
    assert [choice.index for choice in batch.choices] == [0, 1, 2]
    assert batch.choices[0].text == batch.choices[2].text == text.choices[0].text
    assert complete([tokens, tokens]).choices[1].text == text.choices[0].text
    echoed = complete("abc abc", echo=True)
    assert echoed.choices[0].text == "abc abc" + text.choices[0].text
    assert complete("abc abc", echo=True, max_tokens=0).choices[0].text == "abc abc"
    assert client.completions.create(model="tiny", prompt="abc").usage.completion_tokens <= 16
    streamed = complete("abc abc", stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[0].text


def test_logprobs_come_with_their_alternatives(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, temperature=0, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == 12 and all(len(token.top_logprobs) == 3 for token in content)
    for token in content:  # greedy: the token drawn is the likeliest
        assert token.logprob == token.top_logprobs[0].logprob <= 0 and token.bytes == token.top_logprobs[0].bytes
    assert (
        bytes(b for token in content for b in token.bytes).decode(errors="replace") == answer.choices[0].message.content
    )
    streamed = []
    for chunk in chat(
        client, logprobs=True, top_logprobs=3, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed += logprobs.content
    assert streamed == content


def test_an_echoed_prompt_has_log_probabilities_from_its_second_token_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="abc abc", echo=True, logprobs=2, max_tokens=4, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:7] == list("abc abc") and logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:7] == list(range(7))
    assert all(len(top) >= 2 for top in logprobs.top_logprobs[1:])
    only = client.completions.create(model="tiny", prompt="abc abc", echo=True, logprobs=2, max_tokens=0, temperature=0)
    assert only.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:7]
    assert only.usage.completion_tokens == 0


def test_an_answer_follows_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for seed in range(3):
        answer = chat(client, response_format=wanted, max_tokens=200, seed=seed).choices[0]
        assert answer.finish_reason == "stop"
        value = json.loads(answer.message.content)
        assert set(value) == {"name", "age"} and len(value["name"]) <= 5 and value["age"] <= 99


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


def test_an_answer_is_parsed_as_a_model_of_pydantic_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HI, "max_tokens": 400, "seed": 1, "response_format": Person}
    person = client.chat.completions.parse(**options).choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(**options) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == person


def test_an_answer_is_one_of_the_choices(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["red", "blue (dark)"]}}
    texts = {chat(client, extra_body=body, seed=seed).choices[0].message.content for seed in range(6)}
    assert texts <= {"red", "blue (dark)"}


async def test_the_async_client_answers_many_at_once(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(seed: int) -> str:
            answer = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=20, seed=seed)
            return answer.choices[0].message.content or ""

        alone = [await ask(seed) for seed in range(6)]
        assert await asyncio.gather(*(ask(seed) for seed in range(6))) == alone


async def test_cancelled_calls_leave_nothing(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "tiny", "messages": HI, "extra_body": {"ignore_eos": True}}
        before = tokens(server)
        calls = [asyncio.create_task(client.chat.completions.create(**options, n=8)) for _ in range(3)]
        await asyncio.to_thread(until, lambda: tokens(server) > before)
        for call in calls:
            call.cancel()
        stream = await client.chat.completions.create(**options, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.to_thread(settle, server)
        assert tokens(server) - before < 24 * 400, "whole answers fill the context of 512"


def test_a_client_that_times_out_frees_its_place(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.2)
    before = tokens(server)
    with pytest.raises(openai.APITimeoutError):
        chat(client, max_tokens=400, n=32, extra_body={"ignore_eos": True})
    settle(server)
    assert tokens(server) - before < 32 * 400


def test_errors_have_their_classes(one_place: ServerProcess) -> None:
    url = f"{one_place.url}/v1"
    with pytest.raises(openai.AuthenticationError):
        chat(openai.OpenAI(base_url=url, api_key="wrong", max_retries=0))
    settle(one_place, KEY)
    with occupied(one_place), pytest.raises(openai.RateLimitError):
        chat(openai.OpenAI(base_url=url, api_key=KEY, max_retries=0))
    settle(one_place, KEY)


def test_a_call_that_finds_no_place_tries_again(one_place: ServerProcess) -> None:
    settle(one_place, KEY)
    before = refusals(one_place)
    client = openai.OpenAI(base_url=f"{one_place.url}/v1", api_key=KEY, max_retries=5)
    with ThreadPoolExecutor() as threads:
        with occupied(one_place):
            call = threads.submit(chat, client)
            until(lambda: refusals(one_place) > before)
        assert call.result().choices[0].message.content
