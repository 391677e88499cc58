"""LiteLLM and LangChain's client against the real server: what they do in other ways than OpenAI's client, on which
both build. They are imported in fixtures, since that takes seconds, and each of pytest's processes reads every file.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.engine.server.process import ServerProcess

HI = "1 2 3 1 2 3 1 2"
LONG = "x" * 600
ENDLESS: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for a list of prices
    return pytest.importorskip("litellm", reason="pip install litellm")


@pytest.fixture(scope="module")
def completion(litellm: Any, server: ServerProcess) -> Any:
    """LiteLLM's function with what all calls share."""

    def complete(provider: str = "openai", said: Any = HI, **more: Any) -> Any:
        where = {"model": f"{provider}/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return litellm.completion(**where, **{"messages": messages, "max_tokens": 12, **more})

    return complete


def test_litellm_gets_an_answer_and_its_chunks_add_up_to_it_with_its_usage(litellm: Any, completion: Any) -> None:
    whole = completion(seed=3, ignore_eos=True)
    chunks = list(completion(seed=3, ignore_eos=True, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    assert (built.usage.prompt_tokens, built.usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
    for provider in ("hosted_vllm", "litellm_proxy"):
        text = completion(provider, seed=3, ignore_eos=True).choices[0].message.content
        assert text == whole.choices[0].message.content


def test_litellm_sends_back_an_answer_and_takes_a_model_of_pydantic_and_log_probabilities(completion: Any) -> None:
    said = completion().choices[0].message
    question = {"role": "user", "content": HI}
    for message in (said, said.model_dump()):
        assert completion(said=[question, message, question]).choices[0].message.content
    answer = completion(response_format=Person, max_tokens=400, seed=1)
    assert Person.model_validate_json(answer.choices[0].message.content).age <= 99
    (choice,) = completion(logprobs=True, top_logprobs=2, ignore_eos=True).choices
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 12


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_litellms_own_error(
    litellm: Any, completion: Any, provider: str, stream: bool
) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        list(completion(provider, LONG, stream=stream))


@pytest.fixture(scope="module")
def model(server: ServerProcess) -> Any:
    """LangChain's class with what all its objects share."""
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")

    def made(kind: str = "ChatOpenAI", **more: Any) -> Any:
        where = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        return getattr(langchain, kind)(**{**where, "max_tokens": 12, **more})

    return made


def test_langchain_gets_an_answer_and_its_chunks_add_up_to_it_with_its_usage(model: Any) -> None:
    talker = model(seed=3, stream_usage=True, logprobs=True, top_logprobs=2, **ENDLESS)
    whole, total = talker.invoke(HI), None
    for chunk in talker.stream(HI):
        total = chunk if total is None else total + chunk
    assert total is not None and whole.content and total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata and whole.usage_metadata["output_tokens"] == 12
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "length"
    assert [len(one["top_logprobs"]) for one in whole.response_metadata["logprobs"]["content"]] == [2] * 12
    writer = model("OpenAI", seed=3)
    assert "".join(writer.stream("abc")) == writer.invoke("abc")


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema()])
def test_a_structured_answer_to_langchain_follows_its_schema(model: Any, schema: Any) -> None:
    person = model(max_tokens=400, seed=1).with_structured_output(schema).invoke(HI)
    assert Person.model_validate(person).age <= 99


def test_a_structured_answer_to_langchain_may_be_any_json(model: Any) -> None:
    talker = model(max_tokens=400, extra_body={"logit_bias": {str(ord("}") - ord("!") + 4): 100}})
    assert talker.with_structured_output(Person, method="json_mode", include_raw=True).invoke(HI)["raw"].content == "{}"


def test_a_conversation_of_langchains_goes_on_with_its_own_answers(model: Any) -> None:
    messages = importlib.import_module("langchain_core.messages")
    useless = {"reasoning_effort": "low", "verbosity": "low", "service_tier": "auto", "metadata": {"a": "b"}}
    whole = model(**useless).invoke(HI, parallel_tool_calls=False, user="ann")
    blocks = model(output_version="v1").invoke(HI)
    parts = messages.HumanMessage([{"type": "text", "text": HI}])
    said = [messages.SystemMessage("be brief"), messages.HumanMessage(HI), whole, parts, blocks, parts]
    said += [messages.AIMessage(""), messages.AIMessage([]), parts]
    assert model().invoke(said).content


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_langchains_own_error(model: Any, stream: bool) -> None:
    exceptions, talker = importlib.import_module("langchain_core.exceptions"), model()
    with pytest.raises(exceptions.ContextOverflowError):
        list(talker.stream(LONG)) if stream else talker.invoke(LONG)
