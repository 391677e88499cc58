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

from tests.engine.server.figures import refusals, settle, until
from tests.engine.server.process import KEY, ServerProcess, occupied
from tests.engine.server.tool_model import tool

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "1 2 3 1 2 3 1 2"}]
ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 12, **more})


def text_of(client: openai.OpenAI, **more: Any) -> str:
    return str(chat(client, **more).choices[0].message.content)


def test_a_chat_answer_has_text_usage_and_a_finish_reason_streamed_or_not(client: openai.OpenAI) -> None:
    chat(client)  # so that both of these find the prompt in the prefix cache
    whole = chat(client, temperature=0, **ENDLESS)
    assert whole.object == "chat.completion" and whole.model == "tiny"
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    prompt = client.post("/../tokenize", body={"messages": HI}, cast_to=object)
    assert whole.usage.prompt_tokens == prompt["count"]
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (12, 12 + prompt["count"])
    chunks = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}, **ENDLESS))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.metrics["decoding_s"] > 0 and whole.metrics["exact"]
    # role, a chunk a round and one for the prefill, reason, usage
    assert len(chunks) == 1 + (whole.metrics["rounds"] + 1) + 1 + 1


def test_n_choices_are_the_answers_of_seeds_that_count_on_streamed_or_not(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert texts[:2] == [text_of(client, seed=seed) for seed in (7, 8)]
    assert answer.usage.prompt_tokens == chat(client, seed=7).usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in chat(client, n=3, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert len({text_of(client) for _ in range(4)}) > 1, "without a seed it is a random one"


def test_without_a_limit_an_answer_may_take_the_rest_of_the_context(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=None, temperature=0, **ENDLESS)
    assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"
    prompts: Any = ["a" * 500, "a" * 400]
    batch = client.completions.create(model="tiny", prompt=prompts, max_tokens=-1, **ENDLESS)
    assert batch.usage is not None and batch.usage.completion_tokens == 12 + 112


def test_every_chunk_counts_the_tokens_so_far_if_it_is_asked_to(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in chat(client, n=2, stream=True, stream_options=options, **ENDLESS)]
    counts = [usage.completion_tokens for usage in usages]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 24
    assert len({usage.prompt_tokens for usage in usages}) == 1
    details = [usage.prompt_tokens_details for usage in usages]
    assert not any(details[:-1]) and details[-1] is not None


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
    until(lambda: any("ignored field: verbosity:" in line["event"] for line in server.lines))
    for name in useless:
        assert sum(f"ignored field: {name}:" in line["event"] for line in server.lines) == 1


def test_an_answer_may_be_sent_back_and_continued_only_if_that_is_asked_for(client: openai.OpenAI) -> None:
    answer = chat(client).choices[0].message
    for message in (answer, answer.model_dump()):
        assert chat(client, messages=[*HI, message, *HI]).choices[0].message.content
    said = [*HI, {"role": "assistant", "content": "4 5"}]

    def prompt(**more: Any) -> list[int]:
        tokenized: Any = client.post("/../tokenize", body={"messages": said, **more}, cast_to=object)
        return list(tokenized["tokens"])

    ends = prompt(add_generation_prompt=False)
    assert prompt() == [*ends, 2]  # <|assistant|>
    assert prompt(continue_final_message=True) == ends  # this template writes nothing after a message
    for more in ({}, {"continue_final_message": True}):
        assert chat(client, messages=said, extra_body=more).usage.prompt_tokens == len(prompt(**more))


def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = text_of(client, temperature=0, max_tokens=40, **ENDLESS)
    answer = chat(client, temperature=0, max_tokens=40, stop=whole[5:7], **ENDLESS).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content == whole[: whole.index(whole[5:7])]


def test_the_answer_says_what_drafting_brought(client: openai.OpenAI) -> None:
    drafted = chat(client, temperature=0, max_tokens=60, extra_body={"ignore_eos": True, "return_sources": True})
    figures = drafted.metrics["speculative_decoding"]
    assert figures["drafts"] > 0 and figures["accepted_tokens"] == sum(figures["accepted_per_position"])
    assert len([token["source"] for token in drafted.choices[0].sources]) == 60
    off = {"ignore_eos": True, "speculation": {"off": True}}
    plain = chat(client, temperature=0, max_tokens=60, extra_body=off)
    assert plain.choices[0].message.content == drafted.choices[0].message.content
    assert plain.metrics["speculative_decoding"]["drafts"] == 0


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("audio", {"voice": "alloy", "format": "mp3"}, "unsupported"),
        ("n", 0, None),
        ("n", 65, None),
        ("stop", [""], None),
        ("seed", "seven", None),
        ("chat_template_kwargs", {"chat_template": "x"}, None),
        ("tools", [tool()], "unsupported"),
    ],
)
def test_bad_requests_name_the_field(client: openai.OpenAI, field: str, value: Any, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={field: value})
    assert re.split(r"[.[]", refused.value.param or "")[0] == field and field in refused.value.message
    assert (refused.value.type, refused.value.code) == ("invalid_request_error", code)
    assert field != "tools" or "--tool-format" in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_grammar_is_named_as_the_client_sent_it(client: openai.OpenAI, stream: bool) -> None:
    wrong: list[Any] = [("regex", "a(b"), ("json", {"type": "no such type"}), ("json", {"title": "\ud83d"})]
    unfit = [("regex", r"[^\s\S]"), ("grammar", "root ::= root")]  # which are known once no text fits
    for name, sent in wrong if stream else wrong + unfit:
        body = json.dumps({"model": "tiny", "messages": HI, "stream": stream, "structured_outputs": {name: sent}})
        answer = httpx.post(f"{client.base_url}chat/completions", content=body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"structured_outputs.{name}"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        chat(client, model="gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completions_go_on_with_texts_tokens_and_batches(client: openai.OpenAI) -> None:
    def complete(prompt: Any, **more: Any) -> Any:
        return client.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 8, "temperature": 0, **more})

    text = complete("abc abc", **ENDLESS)
    tokens = client.post("/../tokenize", body={"prompt": "abc abc"}, cast_to=object)["tokens"]
    assert complete(tokens, **ENDLESS).choices[0].text == text.choices[0].text
    batch = complete(["abc abc", "xyz", "abc abc"], n=1, **ENDLESS)
    assert [choice.index for choice in batch.choices] == [0, 1, 2]
    assert batch.choices[0].text == batch.choices[2].text == text.choices[0].text
    assert complete([tokens, tokens], **ENDLESS).choices[1].text == text.choices[0].text
    echoed = complete("abc abc", echo=True, **ENDLESS)
    assert echoed.choices[0].text == "abc abc" + text.choices[0].text
    assert complete("abc abc", echo=True, max_tokens=0).choices[0].text == "abc abc"
    assert client.completions.create(model="tiny", prompt="abc", **ENDLESS).usage.completion_tokens == 16
    streamed = complete("abc abc", stream=True, echo=True, **ENDLESS)
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.choices[0].text


def test_logprobs_come_with_their_alternatives(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0, **ENDLESS}
    answer = chat(client, **more).choices[0]
    content = answer.logprobs.content
    assert len(content) == 12 and all(len(token.top_logprobs) == 3 for token in content)
    for token in content:  # greedy: the token drawn is the likeliest
        assert token.logprob == token.top_logprobs[0].logprob <= 0 and token.bytes == token.top_logprobs[0].bytes
    assert bytes(b for token in content for b in token.bytes).decode(errors="replace") == answer.message.content
    parts = [chunk.choices[0].logprobs for chunk in chat(client, stream=True, **more)]
    assert [token for part in parts if part is not None for token in part.content] == content


def test_an_echoed_prompt_has_log_probabilities_from_its_second_token_on(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "abc abc", "echo": True, "logprobs": 2, "temperature": 0}
    logprobs: Any = client.completions.create(**options, max_tokens=4).choices[0].logprobs
    assert logprobs.tokens[:7] == list("abc abc") and logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:7] == list(range(7))
    assert all(len(top) >= 2 for top in logprobs.top_logprobs[1:])
    only = client.completions.create(**options, max_tokens=0)
    assert only.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:7]
    assert only.usage.completion_tokens == 0


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


def test_an_answer_is_parsed_as_a_model_of_pydantic_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HI, "max_tokens": 400, "seed": 1, "response_format": Person}
    choice = client.chat.completions.parse(**options).choices[0]
    assert isinstance(choice.message.parsed, Person) and choice.finish_reason == "stop"
    with client.chat.completions.stream(**options) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_a_message_that_the_client_has_parsed_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Person, seed=1)
    message = answer.choices[0].message
    assert message.parsed is not None and chat(client, messages=[*HI, message, *HI], max_tokens=1).choices


def test_an_answer_is_one_of_the_choices(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["red", "blue (dark)"]}}
    assert {text_of(client, extra_body=body, seed=seed) for seed in range(6)} <= {"red", "blue (dark)"}


async def test_the_async_client_answers_many_at_once(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def ask(seed: int) -> str:
            answer = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=20, seed=seed)
            return answer.choices[0].message.content or ""

        alone = [await ask(seed) for seed in range(6)]
        assert await asyncio.gather(*(ask(seed) for seed in range(6))) == alone


def test_a_call_that_finds_no_place_tries_again(one_place: ServerProcess) -> None:
    settle(one_place, KEY)
    before = refusals(one_place)
    client = openai.OpenAI(base_url=f"{one_place.url}/v1", api_key=KEY, max_retries=5)
    with ThreadPoolExecutor() as threads:
        with occupied(one_place):
            call = threads.submit(chat, client, seed=1, **ENDLESS)
            until(lambda: refusals(one_place) > before)
        assert call.result().choices[0].message.content
