"""LiteLLM, sync and async, against the real server."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.engine.server.figures import refusals, settle, tokens, until
from tests.engine.server.process import KEY, ServerProcess, occupied

litellm: Any
HI = [{"role": "user", "content": "1 2 3 1 2 3 1 2"}]
LONG = [{"role": "user", "content": "x" * 600}]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Here, since it takes seconds, and each of pytest's processes reads every file of tests."""
    global litellm
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for a list of prices
    litellm = pytest.importorskip("litellm", reason="pip install litellm")


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


def options(server: ServerProcess, more: dict[str, Any]) -> dict[str, Any]:
    where = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
    return {**where, "messages": HI, "max_tokens": 12, **more}


def chat(server: ServerProcess, **more: Any) -> Any:
    return litellm.completion(**options(server, more))


def test_an_answer_has_text_usage_and_a_finish_reason(server: ServerProcess) -> None:
    answer = chat(server, temperature=0, ignore_eos=True)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "litellm_proxy"])
def test_every_provider_that_speaks_openais_api_gets_the_same_text(server: ServerProcess, provider: str) -> None:
    texts = {chat(server, model=f"{name}/tiny", seed=3).choices[0].message.content for name in ("openai", provider)}
    assert len(texts) == 1


def test_the_chunks_of_a_stream_add_up_to_the_whole_answer_with_its_usage(server: ServerProcess) -> None:
    whole = chat(server, seed=3, ignore_eos=True)
    chunks = list(chat(server, seed=3, ignore_eos=True, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    assert (built.usage.prompt_tokens, built.usage.completion_tokens) == (whole.usage.prompt_tokens, 12)


def test_stop_texts_and_seeds_reach_the_server(server: ServerProcess) -> None:
    whole = chat(server, seed=5, max_tokens=40, ignore_eos=True).choices[0].message.content
    answer = chat(server, seed=5, max_tokens=40, ignore_eos=True, stop=[whole[8:10]]).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content == whole[: whole.index(whole[8:10])]


def test_several_choices_have_log_probabilities(server: ServerProcess) -> None:
    answer = chat(server, n=3, logprobs=True, top_logprobs=2, ignore_eos=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 12
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_an_answer_follows_a_model_of_pydantic(server: ServerProcess) -> None:
    answer = chat(server, response_format=Person, max_tokens=400, seed=1)
    assert Person.model_validate_json(answer.choices[0].message.content).age <= 99


def test_an_answer_may_be_sent_back(server: ServerProcess) -> None:
    said = chat(server).choices[0].message
    for message in (said, said.model_dump()):
        assert chat(server, messages=[*HI, message, *HI]).choices[0].message.content


def test_text_completions_come_in_batches(server: ServerProcess) -> None:
    where = {"model": "text-completion-openai/tiny", "api_base": f"{server.url}/v1", "api_key": KEY}
    answer = litellm.text_completion(**where, prompt=["abc", "abc"], max_tokens=8, temperature=0)
    assert answer.choices[0].text == answer.choices[1].text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_litellms_own_error(server: ServerProcess, provider: str, stream: bool) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        list(chat(server, model=f"{provider}/tiny", messages=LONG, stream=stream))


def test_errors_have_their_classes(server: ServerProcess, one_place: ServerProcess) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        chat(server, temperature=-1)
    with pytest.raises(litellm.NotFoundError):
        chat(server, model="openai/gpt-4")
    with pytest.raises(litellm.AuthenticationError):
        chat(one_place, api_key="wrong")
    with pytest.raises(litellm.Timeout):
        chat(one_place, timeout=0.3, max_tokens=-1, ignore_eos=True)
    settle(one_place, KEY)
    with occupied(one_place), pytest.raises(litellm.RateLimitError):
        chat(one_place)
    settle(one_place, KEY)


def test_a_call_that_finds_no_place_tries_again(one_place: ServerProcess) -> None:
    settle(one_place, KEY)
    before = refusals(one_place)
    with ThreadPoolExecutor() as threads:
        with occupied(one_place):
            call = threads.submit(chat, one_place, max_retries=5)
            until(lambda: refusals(one_place) > before)
        assert call.result().choices[0].message.content


async def test_the_async_client_answers_many_at_once(server: ServerProcess) -> None:
    async def ask(seed: int) -> str:
        answer = await litellm.acompletion(**options(server, {"seed": seed}))
        return str(answer.choices[0].message.content)

    alone = [await ask(seed) for seed in range(4)]
    assert await asyncio.gather(*(ask(seed) for seed in range(4))) == alone


async def test_a_stream_that_is_left_ends_its_request(one_place: ServerProcess) -> None:
    await asyncio.to_thread(settle, one_place, KEY)
    before = tokens(one_place, KEY)
    stream = await litellm.acompletion(**options(one_place, {"max_tokens": -1, "ignore_eos": True, "stream": True}))
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(settle, one_place, KEY)
    assert tokens(one_place, KEY) - before < 30_000, "a whole answer fills the context of 32768"
