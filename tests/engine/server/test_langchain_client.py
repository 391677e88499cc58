"""LangChain's client of OpenAI's API, sync and async, against the real server."""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.engine.server.figures import refusals, settle, tokens, until
from tests.engine.server.process import KEY, ServerProcess, occupied

langchain_openai: Any
exceptions: Any
messages: Any
HI = "1 2 3 1 2 3 1 2"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Here, since it takes seconds, and each of pytest's processes reads every file of tests."""
    global langchain_openai, exceptions, messages
    langchain_openai = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    exceptions = importlib.import_module("langchain_core.exceptions")
    messages = importlib.import_module("langchain_core.messages")


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


def model(server: ServerProcess, **more: Any) -> Any:
    where = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
    return langchain_openai.ChatOpenAI(**{**where, "max_tokens": 12, **more})


ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def test_an_answer_has_text_usage_and_a_finish_reason(server: ServerProcess) -> None:
    answer = model(server, **ENDLESS).invoke(HI)
    assert answer.content and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.usage_metadata["total_tokens"] == answer.usage_metadata["input_tokens"] + 12


def test_the_chunks_of_a_stream_add_up_to_the_whole_answer_with_its_usage(server: ServerProcess) -> None:
    talker = model(server, seed=3, stream_usage=True, **ENDLESS)
    whole, total = talker.invoke(HI), None
    for chunk in talker.stream(HI):
        total = chunk if total is None else total + chunk
    assert total is not None and total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata["finish_reason"] == "length"


def test_stop_texts_and_seeds_reach_the_server(server: ServerProcess) -> None:
    talker = model(server, seed=5, max_tokens=40, **ENDLESS)
    whole = talker.invoke(HI).content
    answer = talker.invoke(HI, stop=[whole[8:10]])
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.content == whole[: whole.index(whole[8:10])]


def test_answers_have_log_probabilities(server: ServerProcess) -> None:
    answer = model(server, logprobs=True, top_logprobs=2, **ENDLESS).invoke(HI)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == 12 and all(len(token["top_logprobs"]) == 2 for token in content)


def test_several_choices_are_several_generations(server: ServerProcess) -> None:
    (generations,) = model(server, n=3, seed=7, **ENDLESS).generate([[messages.HumanMessage(HI)]]).generations
    assert len({generation.text for generation in generations}) > 1 and len(generations) == 3


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema()])
def test_a_structured_answer_follows_its_schema(server: ServerProcess, schema: Any) -> None:
    person = model(server, max_tokens=400, seed=1).with_structured_output(schema).invoke(HI)
    assert Person.model_validate(person).age <= 99


def test_a_structured_answer_may_be_any_json(server: ServerProcess) -> None:
    talker = model(server, max_tokens=400, extra_body={"logit_bias": {str(ord("}") - ord("!") + 4): 100}})
    assert talker.with_structured_output(Person, method="json_mode", include_raw=True).invoke(HI)["raw"].content == "{}"


def test_a_conversation_goes_on_with_its_own_answers(server: ServerProcess) -> None:
    talker = model(server)
    whole, total = talker.invoke(HI), None
    for chunk in talker.stream(HI):
        total = chunk if total is None else total + chunk
    parts = messages.HumanMessage([{"type": "text", "text": HI}])
    said = [
        messages.SystemMessage("be brief"),
        messages.HumanMessage(HI),
        whole,
        parts,
        total,
        messages.AIMessage(""),
        messages.AIMessage([]),
        parts,
    ]
    assert talker.invoke(said).content
    blocks = model(server, output_version="v1").invoke(HI)
    assert talker.invoke([messages.HumanMessage(HI), blocks, parts]).content


def test_what_changes_no_answer_is_let_through(server: ServerProcess) -> None:
    useless = {"reasoning_effort": "low", "verbosity": "low", "service_tier": "auto", "metadata": {"a": "b"}}
    assert model(server, **useless).invoke(HI, parallel_tool_calls=False, user="ann").content


def test_the_client_of_text_completions_streams_too(server: ServerProcess) -> None:
    where: dict[str, Any] = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": KEY}
    writer = langchain_openai.OpenAI(**where, max_tokens=12, seed=3)
    assert "".join(writer.stream("abc")) == writer.invoke("abc")
    longest = langchain_openai.OpenAI(**where, max_tokens=100_000, seed=3, extra_body={"ignore_eos": True})
    assert longest.generate(["abc"]).llm_output["token_usage"]["total_tokens"] == 512


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_langchains_own_error(server: ServerProcess, stream: bool) -> None:
    talker = model(server)
    with pytest.raises(exceptions.ContextOverflowError):
        list(talker.stream("x" * 600)) if stream else talker.invoke("x" * 600)


def test_errors_have_their_classes(server: ServerProcess, one_place: ServerProcess) -> None:
    with pytest.raises(exceptions.ModelInvalidRequestError, match="temperature"):
        model(server, temperature=-1).invoke(HI)
    with pytest.raises(exceptions.ModelNotFoundError):
        model(server, model="gpt-4").invoke(HI)
    with pytest.raises(exceptions.ModelAuthenticationError):
        model(one_place, api_key="wrong").invoke(HI)
    with pytest.raises(exceptions.ModelTimeoutError):
        model(one_place, timeout=0.3, max_tokens=100_000, **ENDLESS).invoke(HI)
    settle(one_place, KEY)
    with occupied(one_place), pytest.raises(exceptions.ModelRateLimitError):
        model(one_place).invoke(HI)
    settle(one_place, KEY)


def test_a_call_that_finds_no_place_tries_again(one_place: ServerProcess) -> None:
    settle(one_place, KEY)
    before = refusals(one_place)
    with ThreadPoolExecutor() as threads:
        with occupied(one_place):
            call = threads.submit(model(one_place, max_retries=5).invoke, HI)
            until(lambda: refusals(one_place) > before)
        assert call.result().content


async def test_the_async_client_answers_many_at_once(server: ServerProcess) -> None:
    async def ask(seed: int) -> str:
        return str((await model(server, seed=seed).ainvoke(HI)).content)

    alone = [await ask(seed) for seed in range(4)]
    assert await asyncio.gather(*(ask(seed) for seed in range(4))) == alone


async def test_a_stream_that_is_left_ends_its_request(one_place: ServerProcess) -> None:
    await asyncio.to_thread(settle, one_place, KEY)
    before = tokens(one_place, KEY)
    stream = model(one_place, max_tokens=100_000, **ENDLESS).astream(HI)
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(settle, one_place, KEY)
    assert tokens(one_place, KEY) - before < 30_000, "a whole answer fills the context of 32768"
